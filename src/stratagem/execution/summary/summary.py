"""`SummaryCall`, one call of `sg.summary.scalar` etc., and `Summary`, its form in a traced step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stratagem.execution.summary.writer import SummaryWriter


@dataclasses.dataclass(frozen=True, eq=False)
class SummaryCall:
    """One call of a summary function.

    `encode` makes a `Summary.Value` from the result of `reduce`, which runs only if the summary is
    recorded, on `data`, None if it needs none. `step` may be traced; None for the default step.
    """

    tag: str
    encode: Callable[[Any], Any]
    data: Any
    step: Any
    reduce: Callable[[Any], Any] | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Summary:
    """A summary of a traced step.

    `writer` is the default writer set within the step, or None for the caller's. `step` is None
    unless known when the step is traced. A traced step or condition is among the values.
    """

    tag: str
    encode: Callable[[Any], Any]
    writer: SummaryWriter | None = None
    step: int | None = None
    has_traced_step: bool = False
    has_condition: bool = False

    @property
    def needs_step(self) -> bool:
        """True if the summary uses the default step of the call."""
        return self.step is None and not self.has_traced_step

    def writer_of(
        self, default: SummaryWriter | None, *, is_anywhere: bool = False
    ) -> SummaryWriter | None:
        """Returns the writer, or None if nothing is written.

        With `is_anywhere`, a writer that is active only in another process counts, too.
        """
        writer = self.writer or default
        if writer is None or not (writer.has_folder if is_anywhere else writer.is_active):
            return None
        return writer
