"""Optimised HLO text as instructions with shapes, and what a single product costs. Read by `count.py`."""

import functools
import math
import re
from dataclasses import dataclass

import numpy as np

_BYTES = {"pred": 1, "token": 0, "opaque": 0} | {
    f"{kind}{bits}": bits / 8 for kind in ("s", "u", "f", "bf", "c") for bits in (2, 4, 8, 16, 32, 64, 128)
}
_SHAPE = re.compile(r"\b(pred|token|opaque|[sufcb]f?\d+(?:e\d\w*)?)\[([\d,]*)\](\{[^}]*\})?")
_HEADER = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%([\w.\-]+) = ")


@dataclass(frozen=True)
class Shape:
    dtype: str
    dims: tuple[int, ...]
    in_hbm: bool

    @property
    def size(self) -> float:
        """Bytes."""
        width = _BYTES.get(self.dtype)
        return math.prod(self.dims) * (1.0 if width is None else width)  # float8 kinds have long names


@dataclass
class Instruction:
    name: str
    shapes: list[Shape]  # of the result; several for a tuple
    opcode: str
    operands: list[str]
    rest: str  # attributes, and a constant's value
    is_root: bool = False

    def attribute(self, name: str) -> str | None:
        found = re.search(rf"\b{name}=%?([\w.\-]+)", self.rest)
        return found.group(1) if found else None

    def quoted(self, name: str) -> str | None:
        found = re.search(rf'\b{name}="([^"]*)"', self.rest)
        return found.group(1) if found else None


Computation = dict[str, Instruction]


def product_flops(i: Instruction, computation: Computation) -> float:
    """2 x multiply-adds that touch real data (not padding, not the zeros between dilated rows)."""
    out = i.shapes[0].dims
    left, right = (computation[name].shapes[0].dims for name in i.operands[:2])
    if i.opcode == "dot":
        found = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", i.rest)
        contracted = [int(d) for d in found.group(1).split(",")] if found and found.group(1) else []
        return 2.0 * math.prod(out) * math.prod(left[d] for d in contracted)
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", i.rest)
    assert labels is not None, f"convolution without dim_labels: {i.name}"
    lhs, rhs, result = labels.groups()
    spatial = [c for c in lhs if c.isdigit()]
    positions = 1.0
    window = _window(i.rest, len(spatial))
    for n, c in enumerate(spatial):
        positions *= _valid(out[result.index(c)], right[rhs.index(c)], left[lhs.index(c)], window[n])
    groups = int(i.attribute("feature_group_count") or 1) * int(i.attribute("batch_group_count") or 1)
    if int(i.attribute("batch_group_count") or 1) > 1:
        return 2.0 * positions * left[lhs.index("b")] * out[result.index("f")] * right[rhs.index("i")] / groups
    return 2.0 * positions * out[result.index("b")] * out[result.index("f")] * right[rhs.index("i")]


@functools.cache
def _valid(out: int, kernel: int, given: int, window: tuple[int, int, int, int, bool]) -> int:
    """(output, kernel) positions of one spatial axis that meet an input element."""
    stride, pad, left_dilation, right_dilation, _ = window
    at = np.arange(out)[:, None] * stride + np.arange(kernel)[None] * right_dilation - pad
    return int(((at % left_dilation == 0) & (at >= 0) & (at // left_dilation < given)).sum())


def _window(rest: str, rank: int) -> list[tuple[int, int, int, int, bool]]:
    """(stride, low padding, input dilation, kernel dilation, reversed) of each spatial axis."""
    found = re.search(r"window=\{([^}]*)\}", rest)
    fields = dict(part.split("=") for part in found.group(1).split()) if found else {}

    def numbers(name: str, default: int) -> list[int]:
        if name not in fields:
            return [default] * rank
        return [int(part.split("_")[0]) for part in fields[name].split("x")]

    return [
        (s, p, left, right, bool(flip))
        for s, p, left, right, flip in zip(
            numbers("stride", 1),
            numbers("pad", 0),
            numbers("lhs_dilate", 1),
            numbers("rhs_dilate", 1),
            numbers("rhs_reversal", 0),
            strict=True,
        )
    ]


def replica_groups(rest: str) -> np.ndarray | None:
    """[groups, members] of `replica_groups={{..},{..}}` or `replica_groups=[g,n]<=[a,b]T(..)`; None: all devices."""
    iota = re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", rest)
    if iota:
        dims = [int(d) for d in iota.group(3).split(",")]
        ids = np.arange(math.prod(dims)).reshape(dims)
        if iota.group(4):
            ids = ids.transpose([int(d) for d in iota.group(4).split(",")])
        return ids.reshape(int(iota.group(1)), int(iota.group(2)))
    listed = re.search(r"replica_groups=\{(\{[\d,{} ]*\})\}", rest)
    if not listed:
        return None
    return np.array([[int(x) for x in g.split(",")] for g in re.findall(r"\{([\d, ]+)\}", listed.group(1))])


# --- reading the text -----------------------------------------------------------------------------------------------


def parse(text: str) -> tuple[dict[str, Computation], str]:
    computations: dict[str, Computation] = {}
    current: Computation | None = None
    entry = ""
    for line in text.splitlines():
        header = _HEADER.match(line)
        if header:
            current = computations.setdefault(header.group(1), {})
            if line.startswith("ENTRY"):
                entry = header.group(1)
        elif line.startswith("}"):
            current = None
        elif current is not None and (found := _INSTRUCTION.match(line)):
            instruction = _instruction(found.group(1), line[found.end() :])
            instruction.is_root = line.lstrip().startswith("ROOT ")
            current[instruction.name] = instruction
    return computations, entry


def _instruction(name: str, text: str) -> Instruction:
    end = _closing(text, 0) + 1 if text.startswith("(") else text.index(" ")
    opcode, _, arguments = text[end:].strip().partition("(")
    close = _closing("(" + arguments, 0) - 1
    inside, rest = arguments[:close], arguments[close + 1 :]
    operands = re.findall(r"%([\w.\-]+)", inside)
    if opcode in ("parameter", "constant"):
        rest = inside + ")" + rest
    return Instruction(name, shapes_of(text[:end]), opcode.strip(), operands, rest)


def _closing(text: str, start: int) -> int:
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if not depth:
            return i
    return len(text)


def shapes_of(text: str) -> list[Shape]:
    """Every array shape in a piece of HLO text; memory space 0 (or none) is HBM."""
    return [
        Shape(kind, tuple(int(d) for d in dims.split(",")) if dims else (), "S(" not in (layout or ""))
        for kind, dims, layout in _SHAPE.findall(text)
    ]
