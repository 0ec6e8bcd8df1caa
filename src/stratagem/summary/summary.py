"""One call of `sg.summary.scalar` and its like, and what a step's program knows of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

__all__ = ["Summary", "SummaryCall"]


@dataclasses.dataclass(frozen=True, eq=False)
class SummaryCall:
    """What a caller says.

    Args:
        tag: name of the summary in TensorBoard.
        encode: makes a `Summary.Value` of what `reduce` returns.
        data: array, or None where `encode` has it.
        step: an integer, traced or not; None for the default one.
        reduce: what is computed of the data where it is recorded; None for nothing.
    """

    tag: str
    encode: Callable[[Any], Any]
    data: Any
    step: Any
    reduce: Callable[[Any], Any] | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Summary:
    """What is known of a summary when its step is traced.

    Args:
        tag: its name in TensorBoard.
        encode: makes a `Summary.Value` from its data.
        writer: that was made the default within the step; None for the default one of the call.
        step: a number known when the step is traced; None for another one.
        has_traced_step: whether the step is among the values.
        has_condition: whether a condition is among the values, and not asked on the host.
    """

    tag: str
    encode: Callable[[Any], Any]
    writer: Any = None
    step: int | None = None
    has_traced_step: bool = False
    has_condition: bool = False

    @property
    def needs_step(self) -> bool:
        """Whether the default step of the call counts."""
        return self.step is None and not self.has_traced_step

    def writer_of(self, default: Any, *, is_anywhere: bool = False) -> Any:
        """Returns the writer; None where nothing is written.

        Args:
            default: the default one of the call.
            is_anywhere: whether a writer that writes in another process counts.
        """
        writer = self.writer or default
        if writer is None or not (writer.has_folder if is_anywhere else writer.is_active):
            return None
        return writer
