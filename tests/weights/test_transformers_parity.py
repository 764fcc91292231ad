"""What transformers (PyTorch) makes of a folder written here: an independent reader and an independent forward pass."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dstill_jax.config import Llama3RopeScaling, RopeConfig, TargetConfig
from dstill_jax.models import target as target_model
from dstill_jax.models.attention import rope_tables
from dstill_jax.models.target import Target, init_params
from dstill_jax.weights.hf_config import target_config_dict
from dstill_jax.weights.load import load_target, save_target

pytestmark = pytest.mark.slow


def logits_and_taps(target: Target, tokens: np.ndarray, tap_ids: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    ids = jnp.asarray(tokens, jnp.int32)
    positions = jnp.arange(ids.shape[1], dtype=jnp.int32)[None]
    out = target_model.forward(target.config, target.params, ids, positions, tap_ids=tap_ids)
    return np.asarray(target_model.head(target.config, target.params, out.hidden)), np.asarray(out.taps)


def random_config(family: str, scaled: bool) -> TargetConfig:
    scaling = Llama3RopeScaling(8.0, 1.0, 4.0, 16) if scaled else None
    return TargetConfig(
        family=family,
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=12,  # neither a power of two nor hidden / heads
        rms_norm_eps=1e-5,
        rope=RopeConfig(5e5, scaling),
        qk_norm=family == "qwen3",
        attention_bias=True,
        tie_embeddings=not scaled,
        max_position_embeddings=128,
        eos_token_ids=(2, 3),
    )


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("scaled", [False, True])
def test_transformers_computes_the_same_from_a_saved_target(family: str, scaled: bool, tmp_path: Path) -> None:
    import torch
    import transformers

    config = random_config(family, scaled)
    leaves, structure = jax.tree.flatten(init_params(config, jax.random.key(0)))
    rng = np.random.default_rng(0)
    params = jax.tree.unflatten(structure, [jnp.asarray(x + rng.normal(0, 0.1, x.shape), jnp.float32) for x in leaves])
    save_target(tmp_path, config, params)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokens = rng.integers(0, 97, (1, 100))
    with torch.no_grad():
        out = model(torch.from_numpy(tokens), output_hidden_states=True)
    logits, taps = logits_and_taps(load_target(tmp_path), tokens, (0,))
    np.testing.assert_allclose(logits, out.logits.numpy(), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(taps, out.hidden_states[1].numpy(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scaled", [False, True])
def test_rotary_tables_equal_those_of_transformers(scaled: bool, tmp_path: Path) -> None:
    import torch
    import transformers
    import transformers.models.llama.modeling_llama as modeling

    config = random_config("llama", scaled)
    (tmp_path / "config.json").write_text(json.dumps(target_config_dict(config)))
    rotary = modeling.LlamaRotaryEmbedding(transformers.AutoConfig.from_pretrained(tmp_path))
    positions = np.arange(0, 4096, 7)[None]
    cos, sin = rotary(torch.zeros(1), torch.from_numpy(positions))
    half = config.head_dim // 2
    ours = rope_tables(config.rope, config.head_dim, jnp.asarray(positions, jnp.int32))
    for mine, theirs in zip(ours, (cos, sin), strict=True):
        # float32 angles up to 4096 radians: one unit in the last place of the angle is 2.4e-4
        np.testing.assert_allclose(np.asarray(mine)[..., :half], theirs.numpy()[..., :half], atol=5e-4)
