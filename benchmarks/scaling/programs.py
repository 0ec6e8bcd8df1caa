"""What a compiled training step computes and sends, read from the program."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from benchmarks.collectives import collectives_in

__all__ = ["Reduction", "StepProgram", "reductions_in"]


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
    for collective in collectives_in(program):
        if collective.kind != "all-reduce":
            raise ValueError(
                f"The program has a {collective.kind}: {collective.line}. Expected: "
                "all-reduces only. Teach the prediction what it costs."
            )
        found += [Reduction(array.num_bytes, array.dtype) for array in collective.arrays]
    return found
