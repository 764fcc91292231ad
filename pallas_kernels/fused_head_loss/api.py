"""The head loss's public function: checks, row weights and dispatch."""

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.dispatch import resolve
from pallas_kernels.fused_head_loss.blocks import HeadTiles, choose_tiles
from pallas_kernels.fused_head_loss.reference import head_losses_reference
from pallas_kernels.fused_head_loss.shares import HeadShares
from pallas_kernels.fused_head_loss.terms import HeadLosses, Term, check_terms
from pallas_kernels.fused_head_loss.xla import head_losses_xla, setting_of


def check_rows(hidden: Array, head: Array) -> None:
    """ValueError unless rows of hidden states fit a head."""
    if hidden.ndim != 2 or head.ndim != 2 or hidden.shape[1] != head.shape[0] or 0 in (hidden.shape[0], head.shape[1]):
        raise ValueError(f"hidden must be [R, D] and head [D, V] with R, V > 0, got {hidden.shape=} {head.shape=}")


def check_implementation(implementation: str, device_kind: str | None, shares: HeadShares) -> tuple[str, str]:
    """(implementation that runs, device kind it is tuned for); ValueError where there is none."""
    if implementation == "pallas":
        raise ValueError("implementation='pallas' does not exist for the head; use 'auto' or 'xla'")
    if not isinstance(shares, HeadShares):
        raise ValueError(f"shares={shares!r} must be HeadShares(columns, rows)")
    if implementation == "reference" and shares.columns:
        raise ValueError(f"implementation='reference' is for whole heads, got {shares}; use 'auto' or 'xla'")
    shares.check_bound()
    return resolve("xla" if implementation == "auto" else implementation, device_kind)


def _check(hidden: Array, head: Array, labels: tuple, others: tuple, weights: Array | None) -> None:
    check_rows(hidden, head)
    rows = hidden.shape[:1]
    expected = {f"labels[{i}]": (x, rows) for i, x in enumerate(labels)}
    expected |= {f"others[{i}]": (x, hidden.shape) for i, x in enumerate(others)}
    if weights is not None:
        expected["weights"] = (weights, rows)
    for name, (array, shape) in expected.items():
        if array.shape != shape:
            raise ValueError(f"{name}.shape={array.shape} must be {shape}, for {hidden.shape=}")
    for i, label in enumerate(labels):
        if not jnp.issubdtype(label.dtype, jnp.integer):
            raise ValueError(f"labels[{i}].dtype={label.dtype} must be an integer type")


def fused_head_loss(
    hidden: Array,  # [R, D]
    head: Array,  # [D, V]
    *,
    terms: tuple[Term, ...] = (Term("ce"),),
    labels: tuple[Array, ...] = (),  # int [R] each
    others: tuple[Array, ...] = (),  # [R, D] each
    weights: Array | None = None,  # [R]
    head_gradient: bool = False,
    shares: HeadShares = HeadShares(),
    implementation: str = "auto",
    device_kind: str | None = None,
    block_sizes: HeadTiles | None = None,
) -> HeadLosses:
    """Losses of hidden states under a head, float32, one number a row and term; no [R, V] array exists at any time.

    Gradients flow to `hidden`, and with `head_gradient` to `head` through the logits of `hidden`; labels and others are
    constants. Rows of weight 0 cost nothing and give no gradient, whatever they hold, NaN and wrong labels included.

    Args:
      terms: what is computed; `Term` says what each compares with.
      labels: columns of the head; below 0 means that the row has no label, and costs nothing. Beyond the head: NaN.
      others: hidden states whose distribution under the same head is compared with.
      weights: factor on all of a row's values; 1 by default.
      head_gradient: costs one more product and a float32 [D, V]; False stands for a frozen head, gradient zero.
      shares: inside a `jax.shard_map(..., check_vma=False)`, over which axes devices share the columns of the head, and the
        rows. `head` is then this device's columns, labels are columns of the whole head, and all values are those of it.
      implementation: "auto" is "xla" on every device. There is no Pallas version: the tiled program is bound by the
        matrix units, so a kernel of the same products has little to win (figures in the package's README).

    Raises:
      ValueError: shapes, dtypes, terms or an implementation that do not fit; the message says which.
    """
    labels, others, terms = tuple(labels), tuple(others), tuple(Term(*term) for term in terms)
    _check(hidden, head, labels, others, weights)
    check_terms(terms, len(labels), len(others))
    which, kind = check_implementation(implementation, device_kind, shares)
    if weights is not None:
        # 0 x NaN is NaN: what a row of weight 0 holds is replaced, its labels by a column, since one beyond the head is NaN.
        counted = weights != 0
        hidden = jnp.where(counted[:, None], hidden, 0)
        others = tuple(jnp.where(counted[:, None], other, 0) for other in others)
        labels = tuple(jnp.where(counted, label, 0) for label in labels)
    with jax.named_scope("fused_head_loss"):
        if which == "reference":
            frozen = head if head_gradient else jax.lax.stop_gradient(head)
            losses = head_losses_reference(hidden, frozen, labels, others, terms)
        else:
            tiles = choose_tiles(hidden.shape[0] * shares.groups, head.shape[1], block_sizes, kind)
            losses = head_losses_xla(setting_of(terms, tiles, head_gradient, shares), hidden, head, labels, others)
    if weights is None:
        return losses
    return losses._replace(values=tuple(jnp.where(weights != 0, value * weights, 0.0) for value in losses.values))
