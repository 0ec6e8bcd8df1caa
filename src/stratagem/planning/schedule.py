"""Communication in a compiled program, and the compute that overlaps it.

XLA prints a scheduled program in execution order. A message in flight is a pair of instructions,
start and done. On TPU both are fusions, as is the instruction between them that moves data and
computes at once ("async collective fusion").
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from stratagem.observe.hlo import Instruction, computations_of, flops_of, period_of

# Instructions that move no data by themselves.
_FREE = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "iota")
_KINDS = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "collective-permute")

_Computation = Mapping[str, Instruction]


@dataclasses.dataclass(frozen=True)
class OperationCost:
    """FLOPs of products and bytes of an operation that runs `times` times per step."""

    dtype: str
    flops: float
    num_bytes: int
    times: float = 1


@dataclasses.dataclass(frozen=True)
class Reduction:
    """One message between devices, and the products that overlap it.

    Args:
        name: name of the instruction.
        num_bytes: size of the whole array on one device: the one summed, scattered or gathered.
        behind: names of the products that a device computes meanwhile.
        kind: "all-reduce", "reduce-scatter", "all-gather", "all-to-all" or "collective-permute".
        groups: groups of devices that exchange data; empty for all devices together.
        times: number of times it is sent per step; on average, if not in every step.
        leaves_slice: True if each device sends it to its counterparts in the other slices.
    """

    name: str
    num_bytes: int
    behind: tuple[str, ...]
    kind: str = "all-reduce"
    groups: tuple[tuple[int, ...], ...] = ()
    times: float = 1
    leaves_slice: bool = False


_Found = TypeVar("_Found", OperationCost, Reduction)


class Schedule:
    """A compiled program, as returned by `compiled.as_text()`.

    Args:
        text: the program.

    `is_scheduled` is True if its order is the execution order.
    """

    def __init__(self, text: str) -> None:
        self.is_scheduled = "is_scheduled=true" in text
        self._computations, self._entry = computations_of(text)

    def reductions(self) -> list[Reduction]:
        """Returns all messages in the order in which they start.

        Returns:
            The messages; those inside a loop follow the loop's own. Among branches, the one
            counts that sends the most.
        """
        return self._found_in(self._entry, 1, self._message)

    def operations(self) -> list[OperationCost]:
        """Returns the operations that a device runs in a step.

        Returns:
            The operations, without loops, calls and branches around others, and without those that
            move no data. Products of unknown shapes count 0.
        """
        return self._found_in(self._entry, 1, self._cost)

    def accessed_bytes(self) -> int:
        """Returns the bytes read and written if every operation reads its operands in full.

        Returns:
            An upper estimate: a fusion that reads a part of an array counts all of it.
        """
        return round(sum(one.times * one.num_bytes for one in self.operations()))

    def _found_in(
        self,
        name: str,
        times: float,
        find: Callable[[_Computation, Instruction, float], _Found | None],
    ) -> list[_Found]:
        """Collects from a computation, and from those that it runs: of branches, the largest."""
        body = self._computations.get(name, {})
        found: list[_Found] = []
        for one in body.values():
            if (own := find(body, one, times)) is not None:
                found.append(own)
            if one.operation in ("while", "call"):
                for called in one.called:
                    found += self._found_in(called, times * one.trips, find)
            if one.operation == "conditional":
                period = period_of(one.line)
                share = times / period if period > 1 else times
                found += max(
                    (self._found_in(branch, share, find) for branch in one.branches),
                    key=lambda each: sum(one.times * one.num_bytes for one in each),
                    default=[],
                )
        return found

    def _cost(self, body: _Computation, one: Instruction, times: float) -> OperationCost | None:
        if one.operation in (*_FREE, "while", "call", "conditional"):
            return None
        if one.operation.endswith("-done"):
            return None
        operands = _operands(one, body)
        num_bytes = one.num_bytes + sum(operand.num_bytes for operand in operands)
        products = self._products(one, operands)
        flops = sum(flops_of(*product) for product in products)
        first = next((operands[0] for _, operands in products if operands), None)
        return OperationCost(first.dtype if first else "float32", flops, num_bytes, times)

    def _products(
        self, one: Instruction, operands: Sequence[Instruction]
    ) -> list[tuple[Instruction, Sequence[Instruction]]]:
        """Returns the products that an operation is or contains, with their operands."""
        found = [(one, operands)] if one.is_product else []
        for body in (self._computations.get(name, {}) for name in one.called):
            for inner in body.values():
                found += self._products(inner, _operands(inner, body))
        return found

    def _message(self, body: _Computation, one: Instruction, times: float) -> Reduction | None:
        """Returns the message that an instruction is or starts, or None."""
        sent, behind = self._collective(one), tuple[str, ...]()
        if sent is None:
            return None
        if one.operation not in _KINDS:
            behind = self._overlapped_products(list(body.values()), one)
        sizes = sent.array_bytes
        if kind := sent.transfer_between_slices:
            kind = kind if kind in _KINDS else "collective-permute"
            return Reduction(one.name, sizes[0], behind, kind, times=times, leaves_slice=True)
        kind, groups = sent.operation.removesuffix("-start"), sent.groups
        if sent.operation in ("all-gather-start", "reduce-scatter-start"):
            sizes = sizes[len(sizes) // 2 :]  # their result types include the operands
        if sent.operation == "collective-permute-start":
            sizes = sizes[:1]
        scattered = len(groups[0]) if kind == "reduce-scatter" and groups else 1
        return Reduction(one.name, sum(sizes) * scattered, behind, kind, groups, times)

    def _collective(self, one: Instruction) -> Instruction | None:
        if one.operation.removesuffix("-start") in _KINDS or one.transfer_between_slices:
            return one
        if one.operation == "async-start" or one.name.startswith("async-collective-start"):
            return next((each for each in self._inside(one) if each.operation in _KINDS), None)
        return None

    def _overlapped_products(
        self, body: Sequence[Instruction], start: Instruction
    ) -> tuple[str, ...]:
        """Returns the products between a start and its done."""
        reached, between = {start.name}, list[str]()
        for one in body[body.index(start) + 1 :]:
            if reached & one.mentioned:
                reached.add(one.name)
                if "-done" in one.name:
                    return tuple(between)
            between += [each.name for each in (one, *self._inside(one)) if each.is_product]
        return ()  # no done instruction here: the overlap is unknown

    def _inside(self, one: Instruction) -> list[Instruction]:
        """Returns the instructions of the computations that an instruction calls, at any depth."""
        bodies = [self._computations.get(name, {}).values() for name in one.called]
        inner = [each for body in bodies for each in body]
        return inner + [deeper for each in inner for deeper in self._inside(each)]


def share_behind(reductions: Sequence[Reduction]) -> float:
    """Returns the fraction of bytes sent while products are computed.

    Args:
        reductions: messages of a program.

    Returns:
        A fraction from 0 to 1; 0 if there are no messages.
    """
    whole = sum(one.num_bytes * one.times for one in reductions)
    hidden = sum(one.num_bytes * one.times for one in reductions if one.behind)
    return hidden / whole if whole else 0.0


def _operands(one: Instruction, body: _Computation) -> list[Instruction]:
    return [body[name] for name in one.operands if name in body]
