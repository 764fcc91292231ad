"""Linen building blocks: linear, RMSNorm, attention projections, gated MLP.

Parameters keep the dtype they are stored in; the arithmetic runs in the dtype of the activations, so float32 masters
with bfloat16 activations need no second copy of the weights.

The name of a matrix says how it lies: a `kernel` is [in, out], a `weight` is [out, in], as checkpoints store it.
"""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dstill_jax.dims import Params
from dstill_jax.models.attention import apply_rope
from dstill_jax.sharding.weights import matmul

_INIT = nn.initializers.normal(0.02)


def output_first(
    weight: Float[Array, "O I"], x: Float[Array, "*batch I"], dtype: jnp.dtype | None = None
) -> Float[Array, "*batch O"]:
    """x W^T as (W x^T)^T, accumulated in `dtype`: how few rows meet a large matrix fastest on a CPU.

    XLA's CPU products copy their right factor into blocks first. Here that is the rows, not the matrix: 30 layers of
    SmolLM2 take 20 ms for 4 rows this way and 25 ms with kernels [in, out]; its tied head 5.5 ms instead of 8. Past four
    rows they are filled up to a multiple of eight, the width of those blocks: layers and head then take 28 ms for 5 rows
    instead of 34, and 37 for 13 instead of 51.
    """
    *batch, width = x.shape
    rows = math.prod(batch)
    filled = rows if rows <= 4 else -(-rows // 8) * 8
    flat = jnp.pad(x.reshape(rows, width), ((0, filled - rows), (0, 0)))
    y = jnp.einsum("oi,ni->on", weight, flat, preferred_element_type=dtype)
    # The barrier keeps XLA from turning the product round again.
    return jax.lax.optimization_barrier(y)[:, :rows].T.reshape(*batch, -1)


def store_output_first(params: Params) -> Params:
    """The same parameters with every kernel [in, out] as a weight [out, in]."""
    return _turned(params, "kernel", "weight")


def store_input_first(params: Params) -> Params:
    """The same parameters with every weight [out, in] as a kernel [in, out]."""
    return _turned(params, "weight", "kernel")


def _turned(params: Params, old: str, new: str) -> Params:
    turned: Params = {}
    for name, value in params.items():
        if isinstance(value, dict):
            turned[name] = _turned(value, old, new)
        elif name == old:
            turned[new] = value.swapaxes(-1, -2)
        else:
            turned[name] = value
    return turned


class Linear(nn.Module):
    """y = x W (+ b); made with a kernel, and content with a weight instead."""

    features: int
    use_bias: bool = False

    @nn.compact
    def __call__(self, x: Float[Array, "*batch D"]) -> Array:
        if self.has_variable("params", "weight"):
            y = output_first(self.get_variable("params", "weight").astype(x.dtype), x)
        else:
            kernel = self.param("kernel", _INIT, (x.shape[-1], self.features), jnp.float32)
            y = matmul(x, kernel, f"{self.name}/kernel")
        if self.use_bias:
            bias = self.param("bias", nn.initializers.zeros, (self.features,), jnp.float32)
            y = y + bias.astype(x.dtype)
        return y


class RMSNorm(nn.Module):
    """Root-mean-square normalisation over the last axis, in float32."""

    eps: float

    @nn.compact
    def __call__(self, x: Float[Array, "*batch D"]) -> Array:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],), jnp.float32)
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        # Both rounded to x's dtype, multiplied in float32: the same product, and the gradient of `scale`, a sum over all
        # rows and devices, is formed in float32.
        y, scale = (part.astype(x.dtype).astype(jnp.float32) for part in (y, scale))
        return (y * scale).astype(x.dtype)


class AttentionProjections(nn.Module):
    """The weights around attention; the caller decides what attends to what.

    Heads stay on their own axis: [..., heads, E].
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    qk_norm: bool
    use_bias: bool
    eps: float

    def setup(self) -> None:
        self.q_proj = Linear(self.num_heads * self.head_dim, self.use_bias)
        self.k_proj = Linear(self.num_kv_heads * self.head_dim, self.use_bias)
        self.v_proj = Linear(self.num_kv_heads * self.head_dim, self.use_bias)
        self.o_proj = Linear(self.hidden_size, self.use_bias)
        if self.qk_norm:
            self.q_norm = RMSNorm(self.eps)
            self.k_norm = RMSNorm(self.eps)

    def queries(self, x: Float[Array, "*batch N D"], cos: Array, sin: Array) -> Float[Array, "*batch N H E"]:
        q = self.q_proj(x).reshape(*x.shape[:-1], self.num_heads, self.head_dim)
        return apply_rope(self.q_norm(q) if self.qk_norm else q, cos, sin)

    def keys_values(self, x: Float[Array, "*batch N D"], cos: Array, sin: Array) -> tuple[Array, Array]:
        """Returns keys (normed, rotated) and values (neither), each [..., N, G, E]."""
        shape = (*x.shape[:-1], self.num_kv_heads, self.head_dim)
        k = self.k_proj(x).reshape(shape)
        return apply_rope(self.k_norm(k) if self.qk_norm else k, cos, sin), self.v_proj(x).reshape(shape)

    def output(self, attended: Float[Array, "*batch N H E"]) -> Float[Array, "*batch N D"]:
        return self.o_proj(attended.reshape(*attended.shape[:-2], self.num_heads * self.head_dim))


class GatedMLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    intermediate_size: int
    hidden_size: int

    def setup(self) -> None:
        self.gate_proj = Linear(self.intermediate_size)
        self.up_proj = Linear(self.intermediate_size)
        self.down_proj = Linear(self.hidden_size)

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))
