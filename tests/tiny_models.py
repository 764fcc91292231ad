"""Tiny targets and drafters for the tests: random ones, and ones whose behaviour is known in closed form."""

import atexit
import functools
import shutil
import tempfile

import jax
import jax.numpy as jnp
import numpy as np

from dstill_jax.blocks import Sight
from dstill_jax.config import DrafterConfig, RopeConfig, TargetConfig
from dstill_jax.models import drafter as drafter_lib
from dstill_jax.models import target as target_lib
from dstill_jax.models.drafter import Drafter
from dstill_jax.models.target import Target
from dstill_jax.weights.load import save_target


def target_config(**changes) -> TargetConfig:
    settings = {
        "family": "qwen3",
        "vocab_size": 37,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-6,
        "rope": RopeConfig(theta=10000.0),
        "qk_norm": True,
        "attention_bias": False,
        "tie_embeddings": False,
        "max_position_embeddings": 512,
    }
    return TargetConfig(**{**settings, **changes})


def drafter_config(target: TargetConfig, **changes) -> DrafterConfig:
    settings = {
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "intermediate_size": 20,
        "num_layers": 1,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 8,
        "rms_norm_eps": 1e-6,
        "rope": RopeConfig(theta=10000.0),
        "block_size": 5,
        "mask_token_id": target.vocab_size - 1,
        "target_layer_ids": (0, 1),
        "num_target_layers": target.num_layers,
        "max_position_embeddings": 512,
    }
    return DrafterConfig(**{**settings, **changes})


def spread(params: dict, seed: int) -> dict:
    """Random weights of order one, norm scales included: logits far apart, every parameter matters."""
    leaves, tree = jax.tree.flatten(params)
    random = np.random.default_rng(seed)

    def draw(leaf):
        if leaf.ndim == 1:
            return jnp.asarray(1 + 0.3 * random.normal(size=leaf.shape), jnp.float32)
        return jnp.asarray(random.normal(size=leaf.shape) * 1.5 / np.sqrt(leaf.shape[-2]), jnp.float32)

    params = jax.tree.unflatten(tree, [draw(leaf) for leaf in leaves])
    if "embed" in params:
        shape = params["embed"]["embedding"].shape
        params["embed"]["embedding"] = jnp.asarray(random.normal(size=shape), jnp.float32)
    return params


def _empty(init, config) -> dict:
    return jax.eval_shape(functools.partial(init, config), jax.random.key(0))


def random_target(seed: int = 0, **changes) -> Target:
    config = target_config(**changes)
    return Target(config, spread(_empty(target_lib.init_params, config), seed), "memory", f"random-{seed}")


@functools.cache
def stored_target() -> str:
    """Folder of a random target of 5 layers: as few as let two taps be spread."""
    folder = tempfile.mkdtemp(prefix="dstill-target-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    target = random_target(vocab_size=211, hidden_size=32, intermediate_size=48, num_layers=5)
    save_target(folder, target.config, target.params)
    return folder


def random_drafter(target: Target, seed: int = 1, **changes) -> Drafter:
    config = drafter_config(target.config, **changes)
    return Drafter(config, spread(_empty(drafter_lib.init_params, config), seed))


def stack_layers(params: dict) -> dict:
    """Unrolled parameters (`layers_0`, `layers_1`, ...) to the scanned form (`layers`)."""
    names = [f"layers_{i}" for i in range(sum(name.startswith("layers_") for name in params))]
    rest = {name: value for name, value in params.items() if name not in names}
    return {**rest, "layers": jax.tree.map(lambda *leaves: jnp.stack(leaves), *(params[n] for n in names))}


def markov_target(logits: np.ndarray, **changes) -> Target:
    """A target whose logits after token t are exactly `logits[t]`, whatever came before.

    Layers add nothing; embeddings are unit vectors; the head undoes the final norm.
    """
    V = logits.shape[0]
    D = V + V % 2
    config = target_config(vocab_size=V, hidden_size=D, rms_norm_eps=1e-12, **changes)
    params = spread(_empty(target_lib.init_params, config), 0)
    for i in range(config.num_layers):
        for part, name in (("attention", "o_proj"), ("mlp", "down_proj")):
            leaf = params[f"layers_{i}"][part][name]
            leaf["kernel"] = jnp.zeros_like(leaf["kernel"])
    params["embed"]["embedding"] = jnp.eye(V, D)
    params["norm"]["scale"] = jnp.ones(D)
    head = np.zeros((D, V))
    head[:V] = logits / np.sqrt(D)
    params["head"]["kernel"] = jnp.asarray(head, jnp.float32)
    return Target(config, params, "memory", "markov")


def cycle_target(order: list[int], vocab_size: int, **changes) -> Target:
    """A target that emits the tokens of `order` round and round; any other token leads to order[0]."""
    logits = np.zeros((vocab_size, vocab_size))
    logits[:, order[0]] = 8
    for now, following in zip(order, order[1:] + order[:1], strict=True):
        logits[now] = 0
        logits[now, following] = 8
    return markov_target(logits, **changes)


@functools.partial(jax.jit, static_argnames=("target_config", "config"))
def _block_logits(target_config, target_params, config, params, row, length, block):
    positions = jnp.arange(row.shape[0])[None]
    out = target_lib.forward(target_config, target_params, row[None], positions, tap_ids=config.target_layer_ids)
    c = drafter_lib.project_context(config, params, out.taps)
    context = drafter_lib.context_kv(config, params, c, positions)
    hidden = drafter_lib.denoise(
        config,
        params,
        target_lib.embed(target_params, block)[None, None],
        (length + jnp.arange(block.shape[0]))[None, None],
        context,
        Sight(length[None, None]),
    )
    return hidden[0, 0], target_lib.head(target_config, target_params, hidden)[0, 0]


def block_logits(target: Target, config: DrafterConfig, params: dict, row, length: int, block, width: int = 32):
    """Drafter logits [K, V] for the block after the first `length` tokens of one document, written the direct way."""
    padded = np.zeros(width, np.int32)
    padded[:length] = np.asarray(row)[:length]
    _, logits = _block_logits(target.config, target.params, config, params, padded, length, np.asarray(block, np.int32))
    return np.asarray(logits, np.float64)


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = np.asarray(x, np.float64)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))
