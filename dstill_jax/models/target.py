"""The frozen target: a decoder of the Qwen3 or Llama-3 family, exact, with its residual stream tapped.

Called by training (no cache), decoding (cache) and data generation; `weights/load.py` fills its parameters.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dstill_jax.config import TargetConfig
from dstill_jax.dims import Params
from dstill_jax.errors import UserError
from dstill_jax.models import kv_cache
from dstill_jax.models.attention import grouped_attention, rope_tables, tree_attention_over_cache
from dstill_jax.models.kv_cache import KVCache, NewRows
from dstill_jax.models.layers import AttentionProjections, GatedMLP, RMSNorm, output_first
from dstill_jax.sharding.activations import active_mesh, constrain
from dstill_jax.sharding.weights import rows_of_table


class TargetOutput(NamedTuple):
    hidden: Float[Array, "B N D"]  # after the final norm: what the head reads
    taps: Float[Array, "B N T*D"]  # residual stream after each tapped block, in the order asked for
    cache: KVCache | None
    new_rows: NewRows | None = None  # what a tree's pass keeps apart from the cache


class _Carry(NamedTuple):
    """What flows from layer to layer."""

    x: Float[Array, "B N D"]
    cache: KVCache | None
    layer: int | Int[Array, ""]
    taps: Float[Array, "T+1 B N D"]  # the last row collects the layers that nobody taps


class _Step(NamedTuple):
    """What every layer of one forward pass shares."""

    cos: Float[Array, "B N E/2"]
    sin: Float[Array, "B N E/2"]
    mask: Bool[Array, "B N C"] | None
    start: Int[Array, "B"] | None
    visibility: Int[Array, "B N 128"] | None
    tap_slots: Int[Array, "L"]


class DecoderLayer(nn.Module):
    """One pre-norm block; `_Carry` in, `_Carry` out, so that it can be scanned or unrolled."""

    config: TargetConfig

    def setup(self) -> None:
        c = self.config
        self.input_layernorm = RMSNorm(c.rms_norm_eps)
        self.attention = AttentionProjections(
            c.num_heads, c.num_kv_heads, c.head_dim, c.hidden_size, c.qk_norm, c.attention_bias, c.rms_norm_eps
        )
        self.post_attention_layernorm = RMSNorm(c.rms_norm_eps)
        self.mlp = GatedMLP(c.intermediate_size, c.hidden_size)

    def __call__(self, carry: _Carry, step: _Step) -> tuple[_Carry, tuple[Array, Array] | None]:
        x, cache, layer, taps = carry
        normed = self.input_layernorm(x)
        q = self.attention.queries(normed, step.cos, step.sin)
        k, v = self.attention.keys_values(normed, step.cos, step.sin)
        new = None
        if step.visibility is not None:
            attended = tree_attention_over_cache(q, cache, layer, step.start, k, v, step.visibility)
            new = k, v
        else:
            if cache is None:
                keys, values = k.transpose(0, 2, 3, 1), v.swapaxes(1, 2)
            else:
                cache, keys, values = kv_cache.write_layer(cache, layer, k, v, step.start)
            attended = grouped_attention(q, keys, values, step.mask)
        x = x + self.attention.output(attended)
        x = constrain(x + self.mlp(self.post_attention_layernorm(x)), "batch", "seq")
        if taps.shape[0] > 1:
            taps = taps.at[step.tap_slots[layer]].set(x)
        return _Carry(x, cache, layer + 1, taps), new


class Decoder(nn.Module):
    """The whole target. `scan_layers` stacks the layers' parameters on a leading axis and compiles one of them.

    Scanning is right on accelerators; unrolled layers, their matrices stored output first, decode faster on a CPU.
    """

    config: TargetConfig
    scan_layers: bool

    def setup(self) -> None:
        c = self.config
        self.embed = nn.Embed(c.vocab_size, c.hidden_size, embedding_init=nn.initializers.normal(0.02))
        if self.scan_layers:
            scanned = nn.scan(
                DecoderLayer,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                in_axes=nn.broadcast,
                length=c.num_layers,
            )
            self.layers = scanned(c)
        else:
            self.layers = [DecoderLayer(c) for _ in range(c.num_layers)]
        self.norm = RMSNorm(c.rms_norm_eps)
        if not c.tie_embeddings:
            self.head = _Head(c.vocab_size)

    def __call__(
        self,
        tokens: Int[Array, "B N"],
        positions: Int[Array, "B N"],
        cache: KVCache | None,
        start: Int[Array, "B"] | None,
        mask: Bool[Array, "B N C"] | None,
        tap_ids: tuple[int, ...],
        visibility: Int[Array, "B N 128"] | None = None,
    ) -> TargetOutput:
        c = self.config
        x = self.embed(tokens) if active_mesh() is None else rows_of_table(self.embed.embedding, tokens)
        cos, sin = rope_tables(c.rope, c.head_dim, positions)
        slots = [tap_ids.index(i) if i in tap_ids else len(tap_ids) for i in range(c.num_layers)]
        step = _Step(cos, sin, mask, start, visibility, jnp.asarray(slots, jnp.int32))
        taps = constrain(jnp.zeros((len(tap_ids) + 1, *x.shape), x.dtype), None, "batch", "seq")
        if self.scan_layers:
            carry, new = self.layers(_Carry(x, cache, jnp.int32(0), taps), step)
            new_rows = None if new is None else NewRows(*((kind,) for kind in new))
        else:
            carry, every = _Carry(x, cache, 0, taps), []
            for layer in self.layers:
                carry, new = layer(carry, step)
                every.append(new)
            new_rows = None
            if visibility is not None:
                new_rows = NewRows(*(tuple(rows[None] for rows in kind) for kind in zip(*every, strict=True)))
        taps = jnp.moveaxis(carry.taps[:-1], 0, 2).reshape(*tokens.shape, len(tap_ids) * c.hidden_size)
        if not c.tie_embeddings and self.is_initializing():
            self.head(x)
        return TargetOutput(self.norm(carry.x), taps, carry.cache, new_rows)


class _Head(nn.Module):
    """Holds the untied output matrix [D, V]; `head()` multiplies with it."""

    vocab_size: int

    @nn.compact
    def __call__(self, x: Float[Array, "*batch D"]) -> None:
        self.param("kernel", nn.initializers.normal(0.02), (x.shape[-1], self.vocab_size), jnp.float32)


def is_stacked(params: Params) -> bool:
    """Whether the layers' parameters carry a leading layer axis."""
    return "layers" in params


def unstack_layers(params: Params) -> Params:
    """Scanned parameters to the unrolled form."""
    rest = {name: value for name, value in params.items() if name != "layers"}
    count = jax.tree.leaves(params["layers"])[0].shape[0]
    return {**rest, **{f"layers_{i}": jax.tree.map(lambda leaf, i=i: leaf[i], params["layers"]) for i in range(count)}}


def init_params(config: TargetConfig, key: Array, scan_layers: bool = False) -> Params:
    """Random float32 parameters (standard deviation 0.02)."""
    one = jnp.zeros((1, 1), jnp.int32)
    module = Decoder(config, scan_layers)
    return module.init(key, one, one, None, None, jnp.ones((1, 1, 1), bool), ())["params"]


def init_cache(config: TargetConfig, batch: int, capacity: int, dtype: jnp.dtype, stacked: bool) -> KVCache:
    """An empty cache that fits `forward` (`stacked` as `is_stacked(params)`)."""
    return kv_cache.init_cache(config.num_layers, batch, config.num_kv_heads, capacity, config.head_dim, dtype, stacked)


def causal_mask(num_tokens: int, document_ids: Int[Array, "B N"] | None = None) -> Bool[Array, "1|B N N"]:
    """A token may attend to itself and to earlier tokens of its own document."""
    mask = jnp.tril(jnp.ones((num_tokens, num_tokens), bool))[None]
    return mask if document_ids is None else mask & (document_ids[:, :, None] == document_ids[:, None, :])


def forward(
    config: TargetConfig,
    params: Params,
    tokens: Int[Array, "B N"],
    positions: Int[Array, "B N"],
    cache: KVCache | None = None,
    start: Int[Array, "B"] | None = None,
    tap_ids: tuple[int, ...] = (),
    attention_mask: Bool[Array, "B N C"] | None = None,
    visibility: Int[Array, "B N 128"] | None = None,
) -> TargetOutput:
    """Runs N tokens of each row through the target.

    Args:
      cache: where keys and values are appended, at slots start .. start + N - 1; None runs without one.
      tap_ids: 0-based layers whose outputs (before the final norm) are returned, in this order.
      attention_mask: True where a row may attend; default: causal, over the cache slots when there is a cache.
      visibility: makes the tokens rows of a tree: each sees the slots below `start`, and of the others those named here
        (`pallas_kernels.tree_attention`). The cache is read only; the new keys and values are returned apart from it.

    Raises:
      UserError: `tap_ids` names a layer twice, or one that the target does not have.
    """
    if len(set(tap_ids)) < len(tap_ids) or not set(tap_ids) <= set(range(config.num_layers)):
        raise UserError(f"tap_ids={tap_ids} must be distinct layers of 0..{config.num_layers - 1}")
    if attention_mask is None and visibility is None:
        if cache is None:
            attention_mask = jnp.broadcast_to(causal_mask(tokens.shape[1]), (*tokens.shape, tokens.shape[1]))
        else:
            attention_mask = kv_cache.chain_mask(start, tokens.shape[1], kv_cache.capacity_of(cache))
    module = Decoder(config, is_stacked(params))
    with jax.named_scope("target"):
        return module.apply({"params": params}, tokens, positions, cache, start, attention_mask, tap_ids, visibility)


def head_matrix(config: TargetConfig, params: Params) -> Float[Array, "D V"]:
    """The output matrix: the transposed embedding when tied."""
    rows = _head_rows(config, params)
    return params["head"]["kernel"] if rows is None else rows.T


def head_rows(config: TargetConfig, params: Params, tokens: Int[Array, "V'"]) -> Float[Array, "V' D"]:
    """What the head multiplies with to get the logits of these tokens only."""
    rows = _head_rows(config, params)
    return params["head"]["kernel"][:, tokens].T if rows is None else rows[tokens]


def _head_rows(config: TargetConfig, params: Params) -> Float[Array, "V D"] | None:
    """The output matrix by tokens, where it is stored so."""
    return params["embed"]["embedding"] if config.tie_embeddings else params["head"].get("weight")


def head(config: TargetConfig, params: Params, hidden: Float[Array, "*batch D"]) -> Float[Array, "*batch V"]:
    """Logits, float32."""
    rows = _head_rows(config, params)
    with jax.named_scope("head"):
        if rows is None:
            return jnp.einsum("...d,dv->...v", hidden, params["head"]["kernel"], preferred_element_type=jnp.float32)
        if is_stacked(params):  # contract over the last axis: no transposed copy
            return jnp.einsum("...d,vd->...v", hidden, rows, preferred_element_type=jnp.float32)
        return output_first(rows, hidden, jnp.float32)


def embed(params: Params, tokens: Int[Array, "*batch"]) -> Float[Array, "*batch D"]:
    """Rows of the input embedding."""
    return params["embed"]["embedding"][tokens]


@dataclasses.dataclass(frozen=True)
class Target:
    """A loaded target: what `load_target` returns and everything else takes."""

    config: TargetConfig
    params: Params
    source: str  # the folder it was read from
    fingerprint: str  # of its configuration and weights; stored with everything derived from it

    @functools.cached_property
    def tokenizer(self) -> Any:
        """The folder's own tokenizer (a transformers fast tokenizer).

        Raises:
          UserError: the folder has no tokenizer, or transformers is not installed.
        """
        try:
            from transformers import AutoTokenizer
        except ImportError:
            raise UserError("strings need the target's tokenizer; run: pip install 'dstill-jax[data]'") from None
        try:
            return AutoTokenizer.from_pretrained(self.source)
        except Exception as error:  # damaged files surface as many kinds
            raise UserError(f"no usable tokenizer in {self.source!r}: {type(error).__name__}: {error}") from None

    @property
    def dtype(self) -> jnp.dtype:
        return self.params["embed"]["embedding"].dtype
