"""Linen building blocks: linear, RMSNorm, attention projections, gated MLP.

Parameters keep the dtype they are stored in; the arithmetic runs in the dtype of the activations, so float32 masters
with bfloat16 activations need no second copy of the weights.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dstill_jax.models.attention import apply_rope
from dstill_jax.sharding.weights import matmul

_INIT = nn.initializers.normal(0.02)


class Linear(nn.Module):
    """y = x W (+ b), W stored [in, out]."""

    features: int
    use_bias: bool = False

    @nn.compact
    def __call__(self, x: Float[Array, "*batch D"]) -> Array:
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
        return (y.astype(x.dtype) * scale.astype(x.dtype)).astype(x.dtype)


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
