"""The block-diffusion drafter (DFlash, arXiv 2602.06036, section 4.1 and appendix A.3).

Qwen3-shaped layers without embedding or head of their own. Target features are injected as keys and values of every
layer; queries come from the block alone. Training (A anchors a row) and decoding (A = 1, cached context) call the
same three functions.
"""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dstill_jax.blocks import Sight
from dstill_jax.config import DrafterConfig
from dstill_jax.dims import Params
from dstill_jax.errors import UserError
from dstill_jax.models.attention import rope_tables
from dstill_jax.models.block_sharding import spread_block_attention
from dstill_jax.models.layers import AttentionProjections, GatedMLP, Linear, RMSNorm
from dstill_jax.sharding.activations import active_mesh

ContextKV = tuple[tuple[Float[Array, "B G E C"], Float[Array, "B G C E"]], ...]
"""Keys and values of the projected context, a pair per draft layer."""


@dataclasses.dataclass(frozen=True)
class Memory:
    """What training trades for memory; no number of the result depends on it beyond rounding."""

    scan_layers: bool = False  # one draft layer is compiled, in a loop; their weights are stacked in each pass
    remat_layers: bool = False  # the backward pass computes each draft layer again instead of keeping its activations
    # Anchors whose attention scores exist at one time; they are computed again, too. Not on TPUs, where none exist.
    anchor_chunk: int | None = None

    def __post_init__(self) -> None:
        if self.anchor_chunk is not None and self.anchor_chunk < 1:
            raise UserError(f"Memory.anchor_chunk={self.anchor_chunk} must be at least 1, or None for all at once")


class DrafterLayer(nn.Module):
    """One draft layer. The same k and v projections act on the context and on the block."""

    config: DrafterConfig
    anchor_chunk: int | None = None

    def setup(self) -> None:
        c = self.config
        self.input_layernorm = RMSNorm(c.rms_norm_eps)
        self.attention = AttentionProjections(
            c.num_heads, c.num_kv_heads, c.head_dim, c.hidden_size, True, False, c.rms_norm_eps
        )
        self.post_attention_layernorm = RMSNorm(c.rms_norm_eps)
        self.mlp = GatedMLP(c.intermediate_size, c.hidden_size)

    def context_kv(self, c: Float[Array, "B S D"], cos: Array, sin: Array) -> tuple[Array, Array]:
        """Context features are *not* passed through `input_layernorm`."""
        k, v = self.attention.keys_values(c, cos, sin)
        return k.transpose(0, 2, 3, 1), v.swapaxes(1, 2)

    def __call__(
        self,
        x: Float[Array, "B A K D"],
        rope: tuple[Array, Array],
        context_kv: tuple[Array, Array],
        sight: Sight,
        query_slots: Int[Array, "B A R"] | None,
    ) -> Float[Array, "B A R|K D"]:
        normed = self.input_layernorm(x)
        k, v = self.attention.keys_values(normed, *rope)
        if query_slots is not None:  # only these slots go on; every slot still serves as key and value
            rows = query_slots[..., None]
            x, normed = (jnp.take_along_axis(y, rows, axis=2) for y in (x, normed))
            rope = tuple(jnp.take_along_axis(table, rows, axis=2) for table in rope)  # type: ignore[assignment]
        q = self.attention.queries(normed, *rope)
        attended = spread_block_attention(
            q, *context_kv, sight, k, v, query_slots, causal=self.config.causal, anchor_chunk=self.anchor_chunk
        )
        x = x + self.attention.output(attended)
        return x + self.mlp(self.post_attention_layernorm(x))


class DrafterModule(nn.Module):
    config: DrafterConfig
    memory: Memory = Memory()

    def setup(self) -> None:
        c = self.config
        layer = nn.remat(DrafterLayer) if self.memory.remat_layers else DrafterLayer
        self.fc = Linear(c.hidden_size)
        self.hidden_norm = RMSNorm(c.rms_norm_eps)
        self.layers = [layer(c, self.memory.anchor_chunk) for _ in range(c.num_layers)]
        self.norm = RMSNorm(c.rms_norm_eps)

    def project_context(self, taps: Float[Array, "B S T*D"]) -> Float[Array, "B S D"]:
        return self.hidden_norm(self.fc(taps))

    def context_kv(self, c: Float[Array, "B S D"], positions: Int[Array, "B S"]) -> ContextKV:
        tables = rope_tables(self.config.rope, self.config.head_dim, positions)
        return tuple(layer.context_kv(c, *tables) for layer in self.layers)

    def denoise(
        self,
        x: Float[Array, "B A K D"],
        positions: Int[Array, "B A K"],
        context_kv: ContextKV,
        sight: Sight,
        query_slots: Int[Array, "B A R"] | None = None,
    ) -> Float[Array, "B A R|K D"]:
        rope = rope_tables(self.config.rope, self.config.head_dim, positions)
        for i, (layer, kv) in enumerate(zip(self.layers, context_kv, strict=True)):
            last = i == len(self.layers) - 1
            x = layer(x, rope, kv, sight, query_slots if last else None)
        return self.norm(x)

    def everything(self, taps: Array, positions: Array, x: Array, block_positions: Array, sight: Sight) -> Array:
        """Touches every parameter, for initialisation."""
        return self.denoise(x, block_positions, self.context_kv(self.project_context(taps), positions), sight)


def init_params(config: DrafterConfig, key: Array) -> Params:
    """Random float32 parameters."""
    D = config.hidden_size
    args = (
        jnp.zeros((1, 1, config.num_taps * D)),
        jnp.zeros((1, 1), jnp.int32),
        jnp.zeros((1, 1, 2, D)),
        jnp.zeros((1, 1, 2), jnp.int32),
        Sight(jnp.ones((1, 1), jnp.int32)),
    )
    return DrafterModule(config).init(key, *args, method="everything")["params"]


def project_context(config: DrafterConfig, params: Params, taps: Float[Array, "B S T*D"]) -> Float[Array, "B S D"]:
    """c = RMSNorm(W_fc concat(taps)): computed once, shared by all draft layers."""
    return DrafterModule(config).apply({"params": params}, taps, method="project_context")  # type: ignore[return-value]


def context_kv(
    config: DrafterConfig, params: Params, c: Float[Array, "B S D"], positions: Int[Array, "B S"]
) -> ContextKV:
    """Keys and values of the context for every layer: independent of the block, so computed once for many passes."""
    if active_mesh() is not None and config.num_layers > 1:
        return _context_kv_in_a_loop(config, params, c, positions)
    return DrafterModule(config).apply({"params": params}, c, positions, method="context_kv")  # type: ignore[return-value]


def _context_kv_in_a_loop(config: DrafterConfig, params: Params, c: Array, positions: Array) -> ContextKV:
    """`context_kv`, as a scan over the layers.

    On a mesh only: a device stacks its small shares of weights that are gathered for their use anyway, and one layer's
    products, gathers and sums are compiled instead of all layers' (docs/planning.md: what a compilation costs).
    """
    tables = rope_tables(config.rope, config.head_dim, positions)
    layer = DrafterLayer(config)
    used = ("k_proj", "v_proj", "k_norm")
    weights = [{name: params[f"layers_{i}"]["attention"][name] for name in used} for i in range(config.num_layers)]

    def one(_: None, attention: Params) -> tuple[None, tuple[Array, Array]]:
        return None, layer.apply({"params": {"attention": attention}}, c, *tables, method="context_kv")

    _, (keys, values) = jax.lax.scan(one, None, jax.tree.map(lambda *leaves: jnp.stack(leaves), *weights))
    return tuple((keys[i], values[i]) for i in range(config.num_layers))


def denoise(
    config: DrafterConfig,
    params: Params,
    x: Float[Array, "B A K D"],
    positions: Int[Array, "B A K"],
    context_kv: ContextKV,
    sight: Sight,
    query_slots: Int[Array, "B A R"] | None = None,
    memory: Memory = Memory(),
) -> Float[Array, "B A R|K D"]:
    """One pass over A blocks of K embedded slots; returns what the target's head reads.

    Args:
      x: target embeddings of the block's tokens (anchor, then masks or revealed tokens).
      positions: absolute positions of the slots.
      sight: which context slots a block may attend to.
      query_slots: compute the outputs of these slots only, [.., R]; the last layer is then cheaper.
    """
    with jax.named_scope("drafter"):
        if memory.scan_layers:
            return _denoise_in_a_loop(config, params, x, positions, context_kv, sight, query_slots, memory)
        return DrafterModule(config, memory).apply(  # type: ignore[return-value]
            {"params": params}, x, positions, context_kv, sight, query_slots, method="denoise"
        )


def _denoise_in_a_loop(
    config: DrafterConfig,
    params: Params,
    x: Array,
    positions: Array,
    context_kv: ContextKV,
    sight: Sight,
    query_slots: Array | None,
    memory: Memory,
) -> Array:
    """`denoise`, as a scan over the layers; with `query_slots` the last one, which is another program, stands after it."""
    rope = rope_tables(config.rope, config.head_dim, positions)
    layer = DrafterLayer(config, memory.anchor_chunk)

    def one(x: Array, inputs: tuple[Params, tuple[Array, Array]], slots: Array | None = None) -> tuple[Array, None]:
        weights, kv = inputs
        return layer.apply({"params": weights}, x, rope, kv, sight, slots), None

    inputs = [(params[f"layers_{i}"], kv) for i, kv in enumerate(context_kv)]
    looped = inputs if query_slots is None else inputs[:-1]
    if looped:
        body = jax.checkpoint(one) if memory.remat_layers else one
        x, _ = jax.lax.scan(body, x, jax.tree.map(lambda *leaves: jnp.stack(leaves), *looped))
    if query_slots is not None:
        x, _ = one(x, inputs[-1], query_slots)
    return RMSNorm(config.rms_norm_eps).apply({"params": params["norm"]}, x)  # type: ignore[return-value]


@dataclasses.dataclass(frozen=True)
class Drafter:
    """A loaded drafter: what `load_drafter` returns."""

    config: DrafterConfig
    params: Params
    source: str = ""
    target_fingerprint: str | None = None  # of the target it was trained on, when recorded
    vocabulary: tuple[int, ...] | None = None  # token ids it was trained to draft, ascending; None: all
