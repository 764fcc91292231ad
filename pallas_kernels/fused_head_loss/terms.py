"""What a row of logits is compared with, and what comes back. Shared by every implementation."""

from typing import Literal, NamedTuple

from jax import Array

Kind = Literal["ce", "kl_forward", "kl_reverse", "l1"]
KINDS: tuple[Kind, ...] = ("ce", "kl_forward", "kl_reverse", "l1")


class Term(NamedTuple):
    """One loss a row; p is the distribution of `hidden`, q that of another hidden state under the same head.

    Attributes:
      kind: "ce": -log p(label), 0 where the label is below 0; "kl_forward": KL(q || p); "kl_reverse": KL(p || q);
        "l1": sum |p - q|.
      operand: which of `labels` ("ce") or of `others` it compares with.
    """

    kind: Kind
    operand: int = 0


class HeadLosses(NamedTuple):
    """Results of R rows."""

    values: tuple[Array, ...]  # float32 [R] for each term
    best: Array  # int32 [R]: the most likely column, the first of equals


class HeadChoice(NamedTuple):
    """The most likely columns of R rows."""

    best: Array  # int32 [R]: the first of equals
    probability: Array  # float32 [R]


def check_terms(terms: tuple[Term, ...], num_labels: int, num_others: int) -> None:
    """ValueError unless every term has an operand."""
    if not terms:
        raise ValueError("terms=() must name at least one loss")
    for term in terms:
        if term.kind not in KINDS:
            raise ValueError(f"{term} must be one of the kinds {', '.join(KINDS)}")
        name, available = ("labels", num_labels) if term.kind == "ce" else ("others", num_others)
        if not 0 <= term.operand < available:
            raise ValueError(f"{term} needs {name}[{term.operand}], got {available} of them")
