"""The head loss in tiles of rows x vocabulary, in plain XLA, with a gradient of its own.

Forward: one sweep over the vocabulary keeps a running logsumexp of each distribution and what the terms add to it; L1
needs the finished logsumexps and sweeps again. Only those numbers, a few a row, are kept. Backward: one more sweep makes
the logits again and adds their gradient times the head's transpose to a float32 [rows, D]. So a cross-entropy costs
three products, logits, logits again, gradient; each KL adds the other's logits twice.

Devices that share the head's columns sweep over their own; the running sums are merged once, after the sweep.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.fused_head_loss.blocks import HeadTiles
from pallas_kernels.fused_head_loss.shares import HeadShares
from pallas_kernels.fused_head_loss.sweeps import advance, better, logits, merged, over_groups, start, sweep
from pallas_kernels.fused_head_loss.terms import HeadLosses, Term


class _Setting(NamedTuple):
    """What is known when tracing."""

    terms: tuple[Term, ...]
    tiles: HeadTiles
    head_gradient: bool
    shares: HeadShares


class _Rows(NamedTuple):
    """One group of rows; leading axes: groups, rows."""

    hidden: Array  # [R, D]
    labels: tuple[Array, ...]  # [R]
    others: tuple[Array, ...]  # [R, D]


class _Kept(NamedTuple):
    """What the backward pass needs of the forward one; all [R]."""

    lse: Array
    other_lse: tuple[Array, ...]
    values: tuple[Array, ...]
    leans: tuple[Array, ...]  # sum of p sign(p - q) of each L1 term, 0 for the others


def _forward_rows(setting: _Setting, head: Array, rows: _Rows) -> tuple[HeadLosses, _Kept]:
    """One group of rows, and of the results this device's."""
    terms, shares = setting.terms, setting.shares
    own_labels, columns = rows.labels, head.shape[1] * shares.holders
    rows = shares.gather(rows)
    R, labels = rows.hidden.shape[0], _own_columns(shares, rows.labels, head)
    zero = jnp.zeros(R, jnp.float32)
    reverse = [t for t in terms if t.kind == "kl_reverse"]
    forward = [[t for t in terms if t.kind == "kl_forward" and t.operand == i] for i in range(len(rows.others))]

    def visit(carry: Any, tile: Array, first: Array, new: Array) -> Any:
        ours, theirs, picked, best = carry
        p = logits(rows.hidden, tile, new)
        q = [logits(other, tile, new) for other in rows.others]
        best = better(best, ours, p, first)
        picked = tuple(old + _at_label(p, label - first, new) for old, label in zip(picked, labels, strict=True))
        ours = advance(ours, p, tuple(p - q[t.operand] for t in reverse))
        theirs = tuple(advance(state, q[i], tuple(q[i] - p for _ in forward[i])) for i, state in enumerate(theirs))
        return ours, theirs, picked, best

    carry = (
        start(R, len(reverse)),
        tuple(start(R, len(f)) for f in forward),
        (zero,) * len(labels),
        jnp.zeros(R, jnp.int32),
    )
    ours, theirs, picked, best = sweep(head, setting.tiles.columns, visit, carry)
    own_top = ours.top
    ours, *theirs = merged(shares, (ours, *theirs))
    picked, best = shares.sum(picked), shares.best(own_top, best, ours.top, head.shape[1])
    lse = ours.top + jnp.log(ours.total)
    other_lse = tuple(state.top + jnp.log(state.total) for state in theirs)
    gaps, leans = _l1(setting, head, rows, lse, other_lse)
    values = []
    for i, (kind, operand) in enumerate(terms):
        if kind == "ce":
            values.append(lse - picked[operand])
        elif kind == "kl_forward":  # sum q (log q - log p), logits first, logsumexps after
            state, which = theirs[operand], forward[operand].index(terms[i])
            values.append(state.sums[which] / state.total - other_lse[operand] + lse)
        elif kind == "kl_reverse":
            values.append(ours.sums[reverse.index(terms[i])] / ours.total - lse + other_lse[operand])
        else:
            values.append(gaps[i])
    kept, best = shares.own((_Kept(lse, other_lse, tuple(values), leans), best))
    values = [
        _if_given(value, own_labels[operand], columns) if kind == "ce" else value
        for (kind, operand), value in zip(terms, kept.values, strict=True)
    ]
    return HeadLosses(tuple(values), best), kept


def _if_given(value: Array, label: Array, columns: int) -> Array:
    """0 where there is no label; NaN where it is no column of the head: a mistake must not train."""
    return jnp.where(label < 0, 0.0, jnp.where(label < columns, value, jnp.nan))


def _own_columns(shares: HeadShares, labels: tuple[Array, ...], head: Array) -> tuple[Array, ...]:
    """Columns of this device's head; others are below 0 or beyond its width."""
    return tuple(label - shares.first_column(head.shape[1]) for label in labels)


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
        p = jnp.exp(logits(rows.hidden, tile, new) - lse[:, None])
        gaps, leans = (list(x) for x in carry)
        for i, (kind, operand) in enumerate(setting.terms):
            if kind == "l1":
                gap = p - jnp.exp(logits(rows.others[operand], tile, new) - other_lse[operand][:, None])
                gaps[i] += jnp.abs(gap).sum(axis=-1)
                leans[i] += (p * jnp.sign(gap)).sum(axis=-1)
        return tuple(gaps), tuple(leans)

    return setting.shares.sum(sweep(head, setting.tiles.columns, visit, (zeros, zeros)))


def _backward_rows(
    setting: _Setting, head: Array, head_sum: Array | None, rows: _Rows, kept: _Kept, cotangents: tuple[Array, ...]
) -> tuple[Array, Array | None]:
    """(gradient of one group's hidden states, float32 [R, D]; head_sum plus its part of the head's)."""
    shares = setting.shares
    cotangents = shares.whole_cotangents(cotangents)
    scales = [
        _if_given(cotangent, rows.labels[operand], head.shape[1] * shares.holders) if kind == "ce" else cotangent
        for (kind, operand), cotangent in zip(setting.terms, cotangents, strict=True)
    ]
    rows, kept, scales = shares.gather((rows, kept, scales))
    labels = _own_columns(shares, rows.labels, head)

    def of_logits(tile: Array, first: Array, new: Array) -> Array:
        s = logits(rows.hidden, tile, new)
        p = jnp.exp(s - kept.lse[:, None])
        t = [logits(other, tile, new) for other in rows.others]
        columns = first + jnp.arange(tile.shape[1])
        total = jnp.zeros_like(p)
        for i, (kind, operand) in enumerate(setting.terms):
            if kind == "ce":
                gradient = p - ((labels[operand][:, None] == columns) & new)
            else:
                log_q = t[operand] - kept.other_lse[operand][:, None]
                if kind == "kl_forward":
                    gradient = p - jnp.exp(log_q)
                elif kind == "kl_reverse":
                    log_ratio = jnp.where(new, s - kept.lse[:, None] - log_q, 0.0)
                    gradient = p * (log_ratio - kept.values[i][:, None])
                else:
                    gradient = p * (jnp.sign(p - jnp.exp(log_q)) - kept.leans[i][:, None])
            total += scales[i][:, None] * gradient
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

    zeros = jnp.zeros(rows.hidden.shape, jnp.float32)
    by_hidden, by_head = sweep(head, setting.tiles.columns, visit, (zeros, head_sum))
    return shares.own_sum(by_hidden), by_head


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def head_losses_xla(setting: _Setting, hidden: Array, head: Array, labels: Any, others: Any) -> HeadLosses:
    """Shapes as in the reference."""
    return _forward(setting, hidden, head, labels, others)[0]


def _forward(setting: _Setting, hidden: Array, head: Array, labels: Any, others: Any) -> tuple[HeadLosses, _Kept]:
    def one(carry: None, rows: tuple[_Rows]) -> tuple[None, Any]:
        return carry, _forward_rows(setting, head, rows[0])

    return over_groups(setting.tiles.rows, one, (_Rows(hidden, labels, others),))[1]


def _vjp_forward(setting: _Setting, hidden: Array, head: Array, labels: Any, others: Any) -> tuple[HeadLosses, Any]:
    out, kept = _forward(setting, hidden, head, labels, others)
    return out, (hidden, head, labels, others, kept)


def _vjp_backward(setting: _Setting, residuals: Any, cotangents: HeadLosses) -> tuple[Any, ...]:
    hidden, head, labels, others, kept = residuals

    def one(head_sum: Array | None, group: tuple[_Rows, _Kept, Any]) -> tuple[Array | None, Array]:
        by_hidden, head_sum = _backward_rows(setting, head, head_sum, *group)
        return head_sum, by_hidden.astype(hidden.dtype)

    zeros = jnp.zeros(head.shape, jnp.float32) if setting.head_gradient else None
    groups = (_Rows(hidden, labels, others), kept, cotangents.values)
    by_head, by_hidden = over_groups(setting.tiles.rows, one, groups, zeros)
    by_head = jnp.zeros_like(head) if by_head is None else by_head.astype(head.dtype)
    nothing = tuple(None for _ in labels), tuple(jnp.zeros_like(x) for x in others)
    return by_hidden, by_head, *nothing


head_losses_xla.defvjp(_vjp_forward, _vjp_backward)


def setting_of(terms: tuple[Term, ...], tiles: HeadTiles, head_gradient: bool, shares: HeadShares) -> _Setting:
    """The static argument of `head_losses_xla`; `tiles` counts gathered rows."""
    return _Setting(terms, tiles.dealt(shares.groups), head_gradient, shares)
