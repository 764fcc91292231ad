"""What a compiled program does in one run, read from its optimised HLO text: products, HBM traffic, collectives.

XLA's own cost analysis counts the body of a loop once; here every computation is weighed by how often it runs, trip
counts taken from the loops' conditions. The text is that of one device, so redundant work of all devices shows up.
"""

import functools
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from dstill_jax.planning.hlo import Computation, Instruction, Shape, parse, product_flops, replica_groups

_COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "ragged-all-to-all", "collective-permute")
_FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast while conditional call after-all partition-id replica-id iota"
    " opt-barrier add-dependency domain get-dimension-size async-start async-update async-done copy-done"
    " send send-done recv recv-done".split()
)
_IN_PLACE = {"dynamic-update-slice": 1, "scatter": 2}  # which operand holds what is written over the first one


@dataclass(frozen=True)
class Collective:
    """All collectives of one kind, group size and reach, in one run of the program."""

    kind: str
    group: int  # devices of a group
    crosses_slices: bool
    times: float
    bytes: float  # that a device receives in one run


@dataclass
class Counts:
    """One run of the program on one device."""

    flops: float = 0.0  # of matrix products; elementwise work is not counted
    hbm_bytes: float = 0.0
    collectives: dict[tuple[str, int, bool], tuple[float, float]] = field(default_factory=dict)
    notes: set[str] = field(default_factory=set)  # what could not be counted

    def add(self, other: "Counts", times: float) -> None:
        self.flops += other.flops * times
        self.hbm_bytes += other.hbm_bytes * times
        for key, (count, size) in other.collectives.items():
            before = self.collectives.get(key, (0.0, 0.0))
            self.collectives[key] = (before[0] + count * times, before[1] + size * times)
        self.notes |= other.notes

    def by_kind(self) -> list[Collective]:
        """Largest first."""
        found = [Collective(*key, *value) for key, value in self.collectives.items()]
        return sorted(found, key=lambda c: -c.bytes)

    def network_bytes(self, crosses_slices: bool) -> float:
        return sum(c.bytes for c in self.by_kind() if c.crosses_slices == crosses_slices)


class Program:
    """A parsed HLO module."""

    def __init__(self, text: str, num_slices: int = 1) -> None:
        self.computations, self.entry = parse(text)
        partitions = re.search(r"num_partitions=(\d+)", text)
        self.num_devices = int(partitions.group(1)) if partitions else 1
        self._per_slice = max(1, self.num_devices // num_slices)

    def count(self) -> Counts:
        """Everything, loops included."""
        return self._count(self.entry)

    @functools.cache  # noqa: B019 - a Program is short-lived
    def _count(self, name: str) -> Counts:
        total = Counts()
        computation = self.computations[name]
        seen: set[tuple] = set()
        for instruction in computation.values():
            self._add(total, instruction, computation, seen)
        return total

    def _add(self, total: Counts, i: Instruction, computation: Computation, seen: set[tuple]) -> None:
        if i.opcode == "while":
            times = self._trips(i, computation)
            if times is None:
                total.notes.add(f"loop {i.name} has no readable trip count: counted once")
                times = 1
            total.add(self._count(i.attribute("body") or ""), times)
            return
        if i.opcode == "conditional":
            branches = [self._count(name) for name in self._branches(i)]
            total.add(max(branches, key=lambda c: (c.hbm_bytes, c.flops)), 1)
            return
        if i.opcode in ("call", "async-start"):
            called = i.attribute("to_apply") or i.attribute("calls")
            if called in self.computations:
                total.add(self._count(called), 1)
            return
        kind = i.opcode.removesuffix("-start")
        if kind in _COLLECTIVES:
            self._add_collective(total, i, kind, computation)
        if i.opcode in ("dot", "convolution"):
            total.flops += product_flops(i, computation)
        elif i.opcode == "fusion":
            inner = self.computations[i.attribute("calls") or ""]
            total.flops += self._fused_flops(i.attribute("calls") or "")
            for nested in inner.values():
                if nested.opcode.removesuffix("-start") in _COLLECTIVES:
                    self._add_fused_collective(total, nested, inner, i, seen)
        elif i.opcode == "custom-call":
            self._add_kernel_flops(total, i)
        if i.opcode not in _FREE and not i.opcode.endswith("-done"):
            total.hbm_bytes += self._traffic(i, computation)

    def _fused_flops(self, name: str) -> float:
        inner = self.computations[name]
        total = sum(product_flops(i, inner) for i in inner.values() if i.opcode in ("dot", "convolution"))
        nested = (i.attribute("calls") for i in inner.values() if i.opcode == "fusion")
        return total + sum(self._fused_flops(n) for n in nested if n)

    def _add_kernel_flops(self, total: Counts, i: Instruction) -> None:
        if not _is_kernel(i):
            return
        flops = _stated(i, "flops")
        if flops is None:
            total.notes.add(f"kernel {i.name} states no cost: its products are not counted")
        else:
            total.flops += flops

    def _branches(self, i: Instruction) -> list[str]:
        listed = re.search(r"branch_computations=\{([^}]*)\}", i.rest)
        if listed:
            return [name.strip().lstrip("%") for name in listed.group(1).split(",")]
        return [n for n in (i.attribute("true_computation"), i.attribute("false_computation")) if n]

    # --- loops ---

    def _trips(self, loop: Instruction, computation: Computation) -> float | None:
        """From `known_trip_count`, or from a condition that compares a counter with a constant."""
        known = re.search(r'known_trip_count"?[=:]\s*\{"?n"?[:=]"?(\d+)', loop.rest)
        if known:
            return float(known.group(1))
        condition = self.computations.get(loop.attribute("condition") or "")
        if condition is None:
            return None
        compare, names = self._comparison(condition)
        if compare is None:
            return None
        sides = [self._value(name, condition, loop, computation) for name in names]
        if any(side is None for side in sides):
            return None
        steps = [s for s in (self._step(name, condition, loop) for name in names) if s]
        low, high = sides
        if compare.attribute("direction") in ("GT", "GE"):
            low, high = high, low
        last = 1 if compare.attribute("direction") in ("LE", "GE") else 0
        return max(0.0, math.ceil((high - low + last) / abs(steps[0] if steps else 1)))  # type: ignore[operator]

    def _comparison(self, condition: Computation) -> tuple[Instruction | None, list[str]]:
        """The comparison that ends a loop, and what it compares, as names of the condition; it may be in a fusion."""
        for i in condition.values():
            if i.opcode == "compare":
                return i, i.operands
            if i.opcode == "fusion":
                inner = self.computations[i.attribute("calls") or ""]
                for nested in inner.values():
                    if nested.opcode == "compare":
                        return nested, [_outer(inner, name, i) for name in nested.operands]
        return None, []

    def _step(self, name: str, condition: Computation, loop: Instruction) -> float | None:
        """By how much a loop's body changes what `name` stands for in its condition; None: it stays, or is not read."""
        i = condition.get(name)
        body = self.computations.get(loop.attribute("body") or "")
        if i is None or i.opcode != "get-tuple-element" or body is None:
            return None
        root = next((x for x in body.values() if x.is_root), None)
        if root is None or root.opcode != "tuple":
            return None
        changed: Instruction | None = body.get(root.operands[int(i.attribute("index") or 0)])
        inside = body
        while changed is not None and changed.opcode in ("copy", "bitcast", "fusion"):
            if changed.opcode == "fusion":
                inside = self.computations[changed.attribute("calls") or ""]
                changed = next((x for x in inside.values() if x.is_root), None)
            else:
                changed = inside.get(changed.operands[0])
        if changed is None or changed.opcode != "add":
            return None
        values = [_constant(inside[n]) for n in changed.operands if n in inside and inside[n].opcode == "constant"]
        return values[0] if values else None

    def _value(self, name: str, condition: Computation, loop: Instruction, outer: Computation) -> float | None:
        """The constant behind a name in a loop's condition: written there, or in the tuple that enters the loop."""
        i = condition.get(name)
        if i is None:
            return None
        if i.opcode == "constant":
            return _constant(i)
        if i.opcode in ("copy", "bitcast", "convert"):
            return self._value(i.operands[0], condition, loop, outer)
        if i.opcode == "get-tuple-element":
            index = int(i.attribute("index") or 0)
            start = outer.get(loop.operands[0])
            while start is not None and start.opcode in ("copy", "opt-barrier"):
                start = outer.get(start.operands[0])
            if start is None or start.opcode != "tuple":
                return None
            value = outer.get(start.operands[index])
            while value is not None and value.opcode in ("copy", "bitcast", "copy-done", "copy-start", "convert"):
                value = outer.get(value.operands[0])
            return _constant(value) if value is not None and value.opcode == "constant" else None
        return None

    # --- memory and network ---

    def _traffic(self, i: Instruction, computation: Computation) -> float:
        """Bytes that an instruction moves between HBM and the chip; buffers that live in VMEM cost nothing."""
        if i.opcode in ("dynamic-slice", "gather"):
            return 2 * _hbm(i.shapes) + (0 if i.opcode == "dynamic-slice" else _operand_bytes(i, computation, [1]))
        if i.opcode == "dynamic-update-slice":
            return 2 * _operand_bytes(i, computation, [1])
        if i.opcode == "copy-start":  # (destination, source, context)
            return _hbm(i.shapes[:1]) + _operand_bytes(i, computation, [0])
        if i.opcode == "scatter":  # in place: (array, places, updates)
            return 2 * _operand_bytes(i, computation, [2]) + _operand_bytes(i, computation, [1])
        if i.opcode == "fusion":
            return self._fusion_traffic(i, computation)
        if _is_kernel(i) and (stated := _stated(i, "bytes_accessed")) is not None:
            # It may be given a whole cache and read a layer of it. What lies in VMEM was brought there by others.
            given = [s for name in i.operands for s in computation[name].shapes]
            return max(0.0, stated - sum(s.size for s in (*given, *i.shapes) if not s.in_hbm))
        # What starts an operation may give (operands, results, numbers of the transfer), or results alone.
        n = len(i.operands)
        shapes = i.shapes[n : 2 * n] or i.shapes if i.opcode.endswith("-start") else i.shapes
        return _hbm(shapes) + _operand_bytes(i, computation, range(len(i.operands)))

    def _fusion_traffic(self, i: Instruction, computation: Computation) -> float:
        """A fusion reads what it uses: of an operand that it only slices, or writes a part of, that part."""
        total, kept = 0.0, 0.0
        for number, name in enumerate(i.operands):
            if name in computation and _is_in_hbm(computation[name]):
                used = self._used(i.attribute("calls") or "", number)
                total, kept = total + used[0], kept + used[1]
        return total + max(0.0, _hbm(i.shapes) - kept)

    @functools.cache  # noqa: B019
    def _used(self, fused: str, number: int) -> tuple[float, float]:
        """Bytes that a fused computation reads of a parameter, and those of its results that stay what they were there."""
        inner = self.computations[fused]
        found = next(x for x in inner.values() if x.opcode == "parameter" and _parameter_number(x) == number)
        whole = sum(s.size for s in found.shapes)
        read, kept, names = 0.0, 0.0, [found.name]
        while names:  # the parameter, and what is the same array under another shape
            name = names.pop()
            using = [u for u in inner.values() if name in u.operands]
            if not using:
                return whole, 0.0
            for u in using:
                if u.opcode == "bitcast":
                    names.append(u.name)
                elif u.opcode == "fusion":
                    of_u = [self._used(u.attribute("calls") or "", n) for n, x in enumerate(u.operands) if x == name]
                    read, kept = read + sum(r for r, _ in of_u), kept + sum(k for _, k in of_u)
                elif u.opcode in ("slice", "dynamic-slice", "gather") and u.operands[0] == name:
                    read += sum(s.size for s in u.shapes)
                elif u.opcode in _IN_PLACE and u.operands[0] == name:
                    part = sum(s.size for s in inner[u.operands[_IN_PLACE[u.opcode]]].shapes)
                    read, kept = read + part, kept + sum(s.size for s in u.shapes) - part
                else:
                    return whole, 0.0
        return min(read, whole), kept

    def _add_collective(self, total: Counts, i: Instruction, kind: str, computation: Computation) -> None:
        group, crosses = self._groups(i.rest)
        if group <= 1 and kind != "collective-permute":
            return
        given = sum(s.size for name in i.operands if name in computation for s in computation[name].shapes)
        share = (group - 1) / group if group > 1 else 1.0
        moved = {
            "all-gather": given * (group - 1),
            "reduce-scatter": given * share,
            "all-reduce": 2 * given * share,
            "all-to-all": given * share,
            "ragged-all-to-all": given * share,
            "collective-permute": given,
        }[kind]
        before = total.collectives.get((kind, group, crosses), (0.0, 0.0))
        total.collectives[kind, group, crosses] = (before[0] + 1, before[1] + moved)

    def _add_fused_collective(
        self, total: Counts, i: Instruction, inner: Computation, fusion: Instruction, seen: set[tuple]
    ) -> None:
        """A collective in pieces, each fused with work that hides it: every piece shows all of it, and it counts once.

        Each piece also hands the whole result on; that is no traffic, the writing of the result is.
        """
        kind = i.opcode.removesuffix("-start")
        made = i.shapes[-1]
        if made.in_hbm:
            passed_in = any(x.opcode == "parameter" and x.shapes[0].dims == made.dims for x in inner.values())
            total.hbm_bytes -= made.size * (passed_in + any(s.dims == made.dims and s.in_hbm for s in fusion.shapes))
        key = (kind, i.attribute("channel_id"), i.quoted("chain_id"), made.dims)
        if i.quoted("chain_id") is not None and key in seen:
            return
        seen.add(key)
        self._add_collective(total, i, kind, inner)
        total.hbm_bytes += made.size * made.in_hbm

    def _groups(self, rest: str) -> tuple[int, bool]:
        """Size of a collective's groups, and whether one spans slices."""
        pairs = re.search(r"source_target_pairs=\{(.*?)\}\}", rest)
        if pairs:
            ends = [tuple(map(int, p.split(","))) for p in re.findall(r"\{?(\d+,\d+)", pairs.group(1))]
            return 2, any(a // self._per_slice != b // self._per_slice for a, b in ends)
        groups = replica_groups(rest)
        if groups is None:
            return self.num_devices, self._per_slice < self.num_devices
        slices = groups // self._per_slice
        return groups.shape[1], bool((slices != slices[:, :1]).any())


def _outer(inner: Computation, name: str, fusion: Instruction) -> str:
    i = inner[name]
    if i.opcode == "parameter":
        return fusion.operands[_parameter_number(i)]
    return name


def _parameter_number(i: Instruction) -> int:
    return int(re.match(r"\s*(\d+)", i.rest).group(1))  # type: ignore[union-attr]


def _constant(i: Instruction) -> float | None:
    found = re.match(r"\s*(-?\d+)\)?", i.rest)
    return float(found.group(1)) if found else None


def _is_kernel(i: Instruction) -> bool:
    return i.opcode == "custom-call" and "tpu_custom_call" in (i.quoted("custom_call_target") or "")


def _stated(i: Instruction, what: str) -> float | None:
    """From the cost estimate of a kernel."""
    found = re.search(rf'"?{what}"?:\s*"?(\d+)', i.rest)
    return float(found.group(1)) if found else None


def _is_in_hbm(i: Instruction) -> bool:
    return any(s.in_hbm for s in i.shapes)


def _hbm(shapes: Iterable[Shape]) -> float:
    return sum(s.size for s in shapes if s.in_hbm)


def _operand_bytes(i: Instruction, computation: Computation, which: Iterable[int]) -> float:
    names = [i.operands[n] for n in which if n < len(i.operands)]
    return sum(_hbm(computation[name].shapes) for name in names if name in computation)
