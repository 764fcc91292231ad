"""The Pallas implementation with its gradient: lays arrays out for the kernels and binds forward to backward."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.block_attention import kernel_backward, kernel_forward
from pallas_kernels.block_attention.blocks import Tiling
from pallas_kernels.block_attention.plan import Plan, make_plan
from pallas_kernels.block_attention.visibility import Visibility


@dataclasses.dataclass(frozen=True)
class Settings:
    """Static part of a call."""

    forward: Tiling
    backward: Tiling
    scale: float
    keys_transposed: bool  # context_k is [B, G, E, S]
    vmem_limit: int
    interpret: bool | pltpu.InterpretParams


def _to_kernel(x: jax.Array, groups: int, height: int) -> jax.Array:
    """[B, A, R, heads, E] -> [B, A, G, height, E]: heads of a group one after another, padded with zero rows."""
    B, A, R, heads, E = x.shape
    x = x.reshape(B, A, R, groups, heads // groups, E).transpose(0, 1, 3, 4, 2, 5)
    x = x.reshape(B, A, groups, heads // groups * R, E)
    return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, height - x.shape[3]), (0, 0)))


def _from_kernel(x: jax.Array, rows: int, heads: int) -> jax.Array:
    """[B, A, G, height, E] -> [B, A, rows, heads, E]."""
    B, A, G, _, E = x.shape
    x = x[:, :, :, : heads // G * rows].reshape(B, A, G, heads // G, rows, E)
    return x.transpose(0, 1, 4, 2, 3, 5).reshape(B, A, rows, heads, E)


def _sort_rows(x: jax.Array, plan: Plan, groups: int, t: Tiling, fill: float) -> jax.Array:
    """[B, A, R, H] -> [B, G, query_tiles, 1, rows] in the plan's order; copies of the last block get `fill`."""
    B, A = x.shape[:2]
    x = _to_kernel(x[..., None], groups, t.block_rows)[..., 0]  # [B, A, G, N]
    order = plan.order.reshape(B, -1)
    x = jnp.take_along_axis(x, order[..., None, None], axis=1)
    x = jnp.where((jnp.arange(order.shape[1]) < A)[:, None, None], x, fill)
    return x.transpose(0, 2, 1, 3).reshape(B, groups, t.query_tiles, 1, t.rows)


def _unsort_rows(x: jax.Array, plan: Plan, anchors: int, rows: int, heads: int, t: Tiling) -> jax.Array:
    """The inverse of `_sort_rows`."""
    B, G = x.shape[:2]
    x = x.reshape(B, G, t.query_tiles * t.blocks, t.block_rows).transpose(0, 2, 1, 3)[:, :anchors]
    place = jnp.argsort(plan.order.reshape(B, -1)[:, :anchors], axis=1)
    x = jnp.take_along_axis(x, place[..., None, None], axis=1)
    return _from_kernel(x[..., None], rows, heads)[..., 0]


def _key_bound(context_k: jax.Array, used: jax.Array, keys_transposed: bool) -> jax.Array:
    """Largest norm of a key that some row sees, [B * G] float32."""
    squares = jnp.sum(jnp.square(context_k.astype(jnp.float32)), axis=2 if keys_transposed else 3)
    return jnp.sqrt(jnp.max(jnp.where(used[:, None], squares, 0.0), axis=-1)).reshape(-1)


def _run(settings: Settings, q, context_k, context_v, block_k, block_v, sees):
    t, (_, A, R, H, _), (_, G, S, _) = settings.forward, q.shape, context_v.shape
    plan = make_plan(sees, H // G, S, t)
    own = [None if x is None else _to_kernel(x, G, t.block_keys) for x in (block_k, block_v)]
    out, lse2 = kernel_forward.forward(
        _to_kernel(q, G, t.block_rows),
        *own,
        context_k,
        context_v,
        _key_bound(context_k, sees.used(S), settings.keys_transposed),
        plan,
        t,
        settings.scale,
        settings.keys_transposed,
        settings.vmem_limit,
        settings.interpret,
    )
    lse2 = _unsort_rows(lse2, plan, A, R, H, t)
    lse = jnp.where(lse2 > kernel_forward.MASKED, lse2 / kernel_forward.LOG2_E, -jnp.inf)
    return _from_kernel(out, R, H), lse


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attention(
    settings: Settings,
    q: jax.Array,
    context_k: jax.Array,
    context_v: jax.Array,
    block_k: jax.Array | None,
    block_v: jax.Array | None,
    sees: Visibility,
) -> tuple[jax.Array, jax.Array]:
    """(output, logsumexp) as `reference`; differentiable in both. Residuals: the inputs, the output, the logsumexp."""
    return _run(settings, q, context_k, context_v, block_k, block_v, sees)


def _forward(settings: Settings, q, context_k, context_v, block_k, block_v, sees):
    out, lse = _run(settings, q, context_k, context_v, block_k, block_v, sees)
    return (out, lse), (q, context_k, context_v, block_k, block_v, sees, out, lse)


def _backward(settings: Settings, residuals, cotangents):
    q, context_k, context_v, block_k, block_v, sees, out, lse = residuals
    dout, dlse = cotangents
    if settings.keys_transposed:  # four of the five products want keys as rows
        context_k = context_k.swapaxes(2, 3)
    t, (_, _, R, H, _), (_, G, S, _) = settings.backward, q.shape, context_v.shape
    plan = make_plan(sees, H // G, S, t)
    seen = lse > -math.inf
    delta = jnp.sum(dout.astype(jnp.float32) * out.astype(jnp.float32), axis=-1) - jnp.where(seen, dlse, 0.0)
    lse2 = _sort_rows(
        jnp.where(seen, lse * kernel_forward.LOG2_E, kernel_forward.NEVER), plan, G, t, kernel_forward.NEVER
    )
    delta = _sort_rows(delta, plan, G, t, 0.0)
    q_rows, do_rows = (_to_kernel(x, G, t.block_rows) for x in (q, dout.astype(q.dtype)))
    own = [None if x is None else _to_kernel(x, G, t.block_keys) for x in (block_k, block_v)]
    parts, own_gradients = [], []
    for chunk in range(t.chunks):
        here = own if chunk == 0 else [None, None]
        arrays = (q_rows, *here, context_k, context_v, do_rows, lse2, delta)
        dk, dv, dq, *own_parts = kernel_backward.backward(
            *arrays, plan, t, settings.scale, chunk, settings.vmem_limit, settings.interpret
        )
        parts.append((dk, dv, dq))
        own_gradients = own_gradients or own_parts
    dk, dv = (jnp.concatenate([part[i] for part in parts], axis=2)[:, :, :S] for i in (0, 1))
    dk = dk.swapaxes(2, 3) if settings.keys_transposed else dk
    dq = _from_kernel(sum(part[2] for part in parts), R, H).astype(q.dtype)
    down = [None, None]
    if block_k is not None:
        down = [_from_kernel(x, block_k.shape[2], G) for x in own_gradients]
    nothing = jax.tree.map(lambda x: np.zeros(x.shape, jax.dtypes.float0), sees)
    return dq, dk, dv, *down, nothing


attention.defvjp(_forward, _backward)
