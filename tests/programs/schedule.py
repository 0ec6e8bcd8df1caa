"""Reads from a compiled program which sums of gradients travel while the backward pass computes.

XLA prints a scheduled program in the order in which it runs. A sum in flight is a pair of
instructions, a start and a done; on TPU both are fusions, and so is the one between them that moves
data and computes at once ("async collective fusion").
"""

from __future__ import annotations

import dataclasses
import math
import re

# Of an operation that JAX's transposition of a derivative made.
_BACKWARD = "transpose(jvp("
_COMPUTATION = re.compile(r"^(?:ENTRY )?%([\w.-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^ +(?:ROOT )?%([\w.-]+) = (.*?) ([a-z][\w-]*)\(")
_CALLED = re.compile(r"(?:calls|to_apply|body)=%([\w.-]+)")
_ARRAY = re.compile(r"\b(f32|bf16|f16)\[([\d,]*)\]")
_NUM_BYTES = {"f32": 4, "bf16": 2, "f16": 2}
_PRODUCTS = ("dot", "convolution")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a program: what it is called, the type of its result, what it does."""

    name: str
    type: str
    operation: str
    line: str

    @property
    def num_bytes(self) -> int:
        sizes = [(kind, shape.split(",")) for kind, shape in _ARRAY.findall(self.type)]
        return sum(_NUM_BYTES[kind] * math.prod(int(n) for n in dims if n) for kind, dims in sizes)


@dataclasses.dataclass(frozen=True)
class Reduction:
    """One all-reduce, and the matrix products of the backward pass that run while it travels."""

    name: str
    num_bytes: int
    behind: tuple[str, ...]


class Schedule:
    """A compiled program, as `compiled.as_text()` gives it."""

    def __init__(self, text: str) -> None:
        assert "is_scheduled=true" in text
        self._computations: dict[str, list[Instruction]] = {}
        self._entry: list[Instruction] = []
        current: list[Instruction] = []
        for line in text.splitlines():
            if begin := _COMPUTATION.match(line):
                current = self._computations.setdefault(begin[1], [])
                self._entry = current if line.startswith("ENTRY") else self._entry
            elif found := _INSTRUCTION.match(line):
                current.append(Instruction(found[1], found[2], found[3], line))

    def reductions(self) -> list[Reduction]:
        """All all-reduces in the order in which they begin."""
        found = []
        for index, instruction in enumerate(self._entry):
            if instruction.operation in ("all-reduce", "all-reduce-start"):
                num_bytes = instruction.num_bytes
            elif instruction.name.startswith("async-collective-start"):
                inner = [i for i in self._inside(instruction) if i.operation == "all-reduce"]
                assert inner, instruction.line
                num_bytes = inner[0].num_bytes
            else:
                continue
            found.append(Reduction(instruction.name, num_bytes, self._behind(index)))
        return found

    def _behind(self, index: int) -> tuple[str, ...]:
        """Products of the backward pass between a start and its done."""
        start = self._entry[index]
        if start.operation == "all-reduce":
            return ()
        reached, between = {start.name}, []
        for instruction in self._entry[index + 1 :]:
            if reached & set(re.findall(r"%([\w.-]+)", instruction.line.split(" = ", 1)[1])):
                reached.add(instruction.name)
                if "-done" in instruction.name:
                    return tuple(between)
            between += [
                product.name
                for product in (instruction, *self._inside(instruction))
                if product.operation in _PRODUCTS and _BACKWARD in product.line
            ]
        raise AssertionError(f"nothing ends {start.name}")

    def _inside(self, instruction: Instruction) -> list[Instruction]:
        """What an instruction computes in the computations that it calls, at any depth."""
        inner = [
            one
            for name in _CALLED.findall(instruction.line)
            for one in self._computations.get(name, [])
        ]
        return inner + [deeper for one in inner for deeper in self._inside(one)]


def share_behind(reductions: list[Reduction]) -> float:
    """The share of the summed bytes that travel while the backward pass multiplies matrices."""
    hidden = sum(one.num_bytes for one in reductions if one.behind)
    return hidden / sum(one.num_bytes for one in reductions)
