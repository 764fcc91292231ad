"""The head loss in tiles of rows x vocabulary, in plain XLA, with a gradient of its own.

Forward: one sweep over the vocabulary keeps a running logsumexp of each distribution and what the terms add to it; L1
needs the finished logsumexps and sweeps again. Only those numbers, a few a row, are kept. Backward: one more sweep makes
the logits again and adds their gradient times the head's transpose to a float32 [rows, D]. So a cross-entropy costs
three products, logits, logits again, gradient; each KL adds the other's logits twice.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.fused_head_loss.blocks import HeadTiles
from pallas_kernels.fused_head_loss.terms import HeadLosses, Term

_LOW = -1e30  # where running maxima start, and the logit of columns that an earlier tile counted


class _Setting(NamedTuple):
    """What is known when tracing."""

    terms: tuple[Term, ...]
    tiles: HeadTiles
    head_gradient: bool


class _Rows(NamedTuple):
    """One group of rows; leading axes: groups, rows."""

    hidden: Array  # [R, D]
    labels: tuple[Array, ...]  # [R]
    others: tuple[Array, ...]  # [R, D]


class _Softmax(NamedTuple):
    """A running logsumexp and the weighted sums that belong to it, relative to `top`; all [R]."""

    top: Array
    total: Array
    sums: tuple[Array, ...]


class _Kept(NamedTuple):
    """What the backward pass needs of the forward one; all [R]."""

    lse: Array
    other_lse: tuple[Array, ...]
    values: tuple[Array, ...]
    leans: tuple[Array, ...]  # sum of p sign(p - q) of each L1 term, 0 for the others


def _sweep(head: Array, columns: int, visit: Any, carry: Any) -> Any:
    """carry = visit(carry, tile [D, columns], first column, new [columns]) over the vocabulary.

    The last tile begins early rather than reach past the end; `new` is False where an earlier one has been.
    """
    V = head.shape[1]
    if columns >= V:
        return visit(carry, head, 0, jnp.ones(V, bool))

    def one(i: Array, carry: Any) -> Any:
        first = jnp.minimum(i * columns, V - columns)
        tile = jax.lax.dynamic_slice_in_dim(head, first, columns, axis=1)
        return visit(carry, tile, first, first + jnp.arange(columns) >= i * columns)

    return jax.lax.fori_loop(0, -(-V // columns), one, carry)


def _logits(x: Array, tile: Array, new: Array) -> Array:
    logits = jnp.dot(x, tile.astype(x.dtype), preferred_element_type=jnp.float32)
    return jnp.where(new, logits, _LOW)


def _advance(state: _Softmax, logits: Array, factors: tuple[Array, ...]) -> tuple[_Softmax, Array]:
    """The running logsumexp with one tile more; each sum gains exp(logits) times its factor."""
    top = jnp.maximum(state.top, logits.max(axis=-1))
    shrink, weights = jnp.exp(state.top - top), jnp.exp(logits - top[:, None])
    sums = tuple(old * shrink + (weights * f).sum(axis=-1) for old, f in zip(state.sums, factors, strict=True))
    return _Softmax(top, state.total * shrink + weights.sum(axis=-1), sums), top


def _forward_rows(setting: _Setting, head: Array, rows: _Rows) -> tuple[HeadLosses, _Kept]:
    """One group of rows."""
    terms, R = setting.terms, rows.hidden.shape[0]
    zero = jnp.zeros(R, jnp.float32)
    reverse = [t for t in terms if t.kind == "kl_reverse"]
    forward = [[t for t in terms if t.kind == "kl_forward" and t.operand == i] for i in range(len(rows.others))]

    def start(count: int) -> _Softmax:
        return _Softmax(jnp.full(R, _LOW), zero, (zero,) * count)

    def visit(carry: Any, tile: Array, first: Array, new: Array) -> Any:
        ours, theirs, picked, best = carry
        p = _logits(rows.hidden, tile, new)
        q = [_logits(other, tile, new) for other in rows.others]
        highest = p.max(axis=-1)
        here = first + jnp.argmax(p, axis=-1).astype(jnp.int32)
        best = jnp.where(highest > ours.top, here, best)
        picked = tuple(old + _at_label(p, label - first, new) for old, label in zip(picked, rows.labels, strict=True))
        ours, _ = _advance(ours, p, tuple(p - q[t.operand] for t in reverse))
        theirs = tuple(_advance(state, q[i], tuple(q[i] - p for _ in forward[i]))[0] for i, state in enumerate(theirs))
        return ours, theirs, picked, best

    carry = (
        start(len(reverse)),
        tuple(start(len(f)) for f in forward),
        (zero,) * len(rows.labels),
        jnp.zeros(R, jnp.int32),
    )
    ours, theirs, picked, best = _sweep(head, setting.tiles.columns, visit, carry)
    lse = ours.top + jnp.log(ours.total)
    other_lse = tuple(state.top + jnp.log(state.total) for state in theirs)
    gaps, leans = _l1(setting, head, rows, lse, other_lse)
    values = []
    for i, (kind, operand) in enumerate(terms):
        if kind == "ce":
            values.append(jnp.where(rows.labels[operand] >= 0, lse - picked[operand], 0.0))
        elif kind == "kl_forward":  # sum q (log q - log p), logits first, logsumexps after
            state, which = theirs[operand], forward[operand].index(terms[i])
            values.append(state.sums[which] / state.total - other_lse[operand] + lse)
        elif kind == "kl_reverse":
            values.append(ours.sums[reverse.index(terms[i])] / ours.total - lse + other_lse[operand])
        else:
            values.append(gaps[i])
    return HeadLosses(tuple(values), best), _Kept(lse, other_lse, tuple(values), leans)


def _at_label(logits: Array, column: Array, new: Array) -> Array:
    """logits[r, column[r]], 0 where that column is not in this tile or was in the one before."""
    width = logits.shape[1]
    inside = (column >= 0) & (column < width)
    column = jnp.clip(column, 0, width - 1)
    return jnp.where(inside & new[column], jnp.take_along_axis(logits, column[:, None], axis=1)[:, 0], 0.0)


def _l1(
    setting: _Setting, head: Array, rows: _Rows, lse: Array, other_lse: tuple[Array, ...]
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """(sum |p - q|, sum p sign(p - q)) of each L1 term, zeros for other terms, which cost nothing."""
    zero = jnp.zeros_like(lse)
    zeros = (zero,) * len(setting.terms)
    if all(t.kind != "l1" for t in setting.terms):
        return zeros, zeros

    def visit(carry: Any, tile: Array, first: Array, new: Array) -> Any:
        del first
        p = jnp.exp(_logits(rows.hidden, tile, new) - lse[:, None])
        gaps, leans = (list(x) for x in carry)
        for i, (kind, operand) in enumerate(setting.terms):
            if kind == "l1":
                gap = p - jnp.exp(_logits(rows.others[operand], tile, new) - other_lse[operand][:, None])
                gaps[i] += jnp.abs(gap).sum(axis=-1)
                leans[i] += (p * jnp.sign(gap)).sum(axis=-1)
        return tuple(gaps), tuple(leans)

    return _sweep(head, setting.tiles.columns, visit, (zeros, zeros))


def _backward_rows(
    setting: _Setting, head: Array, head_sum: Array | None, rows: _Rows, kept: _Kept, cotangents: tuple[Array, ...]
) -> tuple[Array, Array | None]:
    """(gradient of one group's hidden states, float32 [R, D]; head_sum plus its part of the head's)."""

    def of_logits(tile: Array, first: Array, new: Array) -> Array:
        s = _logits(rows.hidden, tile, new)
        p = jnp.exp(s - kept.lse[:, None])
        t = [_logits(other, tile, new) for other in rows.others]
        columns = first + jnp.arange(tile.shape[1])
        total = jnp.zeros_like(p)
        for i, (kind, operand) in enumerate(setting.terms):
            if kind == "ce":
                label = rows.labels[operand]
                scale = jnp.where(label >= 0, cotangents[i], 0.0)[:, None]
                gradient = p - ((label[:, None] == columns) & new)
            else:
                scale, log_q = cotangents[i][:, None], t[operand] - kept.other_lse[operand][:, None]
                if kind == "kl_forward":
                    gradient = p - jnp.exp(log_q)
                elif kind == "kl_reverse":
                    log_ratio = jnp.where(new, s - kept.lse[:, None] - log_q, 0.0)
                    gradient = p * (log_ratio - kept.values[i][:, None])
                else:
                    gradient = p * (jnp.sign(p - jnp.exp(log_q)) - kept.leans[i][:, None])
            total += scale * gradient
        return total.astype(rows.hidden.dtype)

    def visit(carry: Any, tile: Array, first: Array, new: Array) -> Any:
        by_hidden, by_head = carry
        gradient = of_logits(tile, first, new)
        back = jax.lax.dot_general(gradient, tile.astype(gradient.dtype), (((1,), (1,)), ((), ())),
                                   preferred_element_type=jnp.float32)  # fmt: skip
        if by_head is not None:
            part = jax.lax.dot_general(rows.hidden, gradient, (((0,), (0,)), ((), ())),
                                       preferred_element_type=jnp.float32)  # fmt: skip
            old = jax.lax.dynamic_slice_in_dim(by_head, first, tile.shape[1], axis=1)
            by_head = jax.lax.dynamic_update_slice_in_dim(by_head, old + part, first, axis=1)
        return by_hidden + back, by_head

    start = jnp.zeros(rows.hidden.shape, jnp.float32)
    return _sweep(head, setting.tiles.columns, visit, (start, head_sum))


def _split(setting: _Setting, tree: Any) -> Any:
    """Rows [R, ...] to groups [count, rows, ...], padded with zeros."""

    def one(x: Array) -> Array:
        count = -(-x.shape[0] // setting.tiles.rows)
        padded = jnp.pad(x, ((0, count * setting.tiles.rows - x.shape[0]), *((0, 0),) * (x.ndim - 1)))
        return padded.reshape(count, setting.tiles.rows, *x.shape[1:])

    return jax.tree.map(one, tree)


def _over_groups(setting: _Setting, function: Any, rows: Any, carry: Any = None) -> tuple[Any, Any]:
    """(carry, results [R, ...]) of carry, result = function(carry, group); no loop for a single group."""
    R = rows[0].hidden.shape[0]
    if setting.tiles.rows >= R:
        return function(carry, rows)
    carry, out = jax.lax.scan(function, carry, _split(setting, rows))
    return carry, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:R], out)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def head_losses_xla(setting: _Setting, hidden: Array, head: Array, labels: Any, others: Any) -> HeadLosses:
    """Shapes as in the reference."""
    return _forward(setting, hidden, head, labels, others)[0]


def _forward(setting: _Setting, hidden: Array, head: Array, labels: Any, others: Any) -> tuple[HeadLosses, _Kept]:
    def one(carry: None, rows: tuple[_Rows]) -> tuple[None, Any]:
        return carry, _forward_rows(setting, head, rows[0])

    return _over_groups(setting, one, (_Rows(hidden, labels, others),))[1]


def _vjp_forward(setting: _Setting, hidden: Array, head: Array, labels: Any, others: Any) -> tuple[HeadLosses, Any]:
    out, kept = _forward(setting, hidden, head, labels, others)
    return out, (hidden, head, labels, others, kept)


def _vjp_backward(setting: _Setting, residuals: Any, cotangents: HeadLosses) -> tuple[Any, ...]:
    hidden, head, labels, others, kept = residuals

    def one(head_sum: Array | None, group: tuple[_Rows, _Kept, Any]) -> tuple[Array | None, Array]:
        by_hidden, head_sum = _backward_rows(setting, head, head_sum, *group)
        return head_sum, by_hidden.astype(hidden.dtype)

    start = jnp.zeros(head.shape, jnp.float32) if setting.head_gradient else None
    groups = (_Rows(hidden, labels, others), kept, cotangents.values)
    by_head, by_hidden = _over_groups(setting, one, groups, start)
    by_head = jnp.zeros_like(head) if by_head is None else by_head.astype(head.dtype)
    nothing = tuple(None for _ in labels), tuple(jnp.zeros_like(x) for x in others)
    return by_hidden, by_head, *nothing


head_losses_xla.defvjp(_vjp_forward, _vjp_backward)


def setting_of(terms: tuple[Term, ...], tiles: HeadTiles, head_gradient: bool) -> _Setting:
    """The static argument of `head_losses_xla`."""
    return _Setting(terms, tiles, head_gradient)
