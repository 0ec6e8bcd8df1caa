"""What a compiled training step computes and sends, read from the program."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

__all__ = ["Reduction", "StepProgram", "reductions_in"]

# The type stands between "=" and the operation: one array, or a tuple of those of one message.
_COLLECTIVE = re.compile(
    r"= (?P<type>\([^()]*(?:\([^()]*\)[^()]*)*\)|\S+) "
    r"(?P<name>all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
    r"|collective-broadcast)(?:-start)?\("
)
_ARRAY = re.compile(r"\b(?P<dtype>pred|bf16|[a-z]\d+)\[(?P<sizes>[\d,]*)\]")


@dataclasses.dataclass(frozen=True)
class Reduction:
    """An array that is summed over all devices."""

    num_bytes: int
    dtype: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepProgram:
    """One training step of one device.

    Args:
        title: of the workload.
        batch_size: examples of one device.
        num_parameters: that are trained.
        dtype: of the matrix products.
        flops: that the compiler counts in the program.
        accessed_bytes: that it reads and writes, likewise.
        reductions: the arrays that it sums over the devices, in the program's order.
    """

    title: str
    batch_size: int
    num_parameters: int
    dtype: str
    flops: float
    accessed_bytes: float
    reductions: tuple[Reduction, ...]

    @classmethod
    def from_answer(cls, answer: Mapping[str, Any]) -> StepProgram:
        """Reads what the worker `compiled_step` answers."""
        known = {field.name: answer[field.name] for field in dataclasses.fields(cls)}
        reductions = tuple(Reduction(**reduction) for reduction in answer["reductions"])
        return cls(**{**known, "reductions": reductions})

    @property
    def reduced_bytes(self) -> int:
        return sum(reduction.num_bytes for reduction in self.reductions)


def reductions_in(program: str) -> list[Reduction]:
    """Returns the arrays that a program sums over the devices.

    Args:
        program: optimised HLO, as `compiled.as_text()` gives it.

    Returns:
        The arrays in the program's order, those of a tuple one by one.

    Raises:
        ValueError: another collective, which the prediction knows nothing of.
    """
    found: list[Reduction] = []
    for line in program.splitlines():
        collective = _COLLECTIVE.search(line)
        if collective is None:
            continue
        if collective["name"] != "all-reduce":
            raise ValueError(
                f"The program has a {collective['name']}: {line.strip()[:200]}. Expected: "
                "all-reduces only. Teach the prediction what it costs."
            )
        found += [
            Reduction(_num_bytes(array["dtype"], array["sizes"]), array["dtype"])
            for array in _ARRAY.finditer(collective["type"])
        ]
    return found


def _num_bytes(dtype: str, sizes: str) -> int:
    bits = {"pred": 8, "bf16": 16}.get(dtype) or int(dtype[1:])
    return math.prod(int(size) for size in sizes.split(",") if size) * bits // 8
