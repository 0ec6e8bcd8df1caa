"""Planned and measured memory of one device, as a table."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from rich.table import Table

__all__ = ["MOST_APART", "Comparison", "make_table"]

# The bound of the issue that asked for this.
MOST_APART = 0.1
_BYTES_PER_MIB = 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """One workload.

    Args:
        workload: its title.
        batch_size: examples of one device.
        compiler: which compiler the plan comes from.
        planned_state_bytes: variables of all kinds, as the plan has them.
        planned_bytes: the whole, as the plan for one device has it, which one can measure.
        planned_of_many_bytes: the whole, as the plan for all devices has it, of one of them.
        measured_state_bytes: arrays that are there between steps.
        measured_bytes: the peak that the device told, or on a CPU, which tells none, the memory
            that the program's compiler states, with the next batch.
        how: where that comes from: "peak of the device" or "program that ran".
    """

    workload: str
    batch_size: int
    compiler: str
    planned_state_bytes: int
    planned_bytes: int
    planned_of_many_bytes: int
    measured_state_bytes: int
    measured_bytes: int
    how: str

    @property
    def state_ratio(self) -> float:
        """The plan's state over what is there."""
        return self.planned_state_bytes / self.measured_state_bytes

    @property
    def ratio(self) -> float:
        """The plan for one device over the measurement."""
        return self.planned_bytes / self.measured_bytes

    @property
    def ratio_of_many(self) -> float:
        """The plan for all devices over the measurement: sums keep gradients longer."""
        return self.planned_of_many_bytes / self.measured_bytes

    @property
    def agrees(self) -> bool:
        """Whether both are within the bound."""
        return all(abs(one - 1) <= MOST_APART for one in (self.state_ratio, self.ratio))


def make_table(target: str, device: str, rows: Sequence[Comparison]) -> Table:
    """Returns a row for each workload.

    Args:
        target: that was planned for.
        device: that was measured.
        rows: the comparisons.
    """
    title = f"plan: memory of a device, beside one replica on {device}; MiB"
    table = Table(title=title, title_justify="left")
    table.add_column("a step of one device")
    table.add_column("compiled for")
    for header in ("state", "measured", "ratio", "whole", "measured", "ratio", target, "ratio"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("measured by")
    for row in rows:
        color = "green" if row.agrees else "yellow"
        table.add_row(
            f"{row.workload}, {row.batch_size} a device",
            row.compiler,
            _mib(row.planned_state_bytes),
            _mib(row.measured_state_bytes),
            f"{row.state_ratio:.3f}",
            _mib(row.planned_bytes),
            _mib(row.measured_bytes),
            f"[bold {color}]{row.ratio:.3f}[/]",
            _mib(row.planned_of_many_bytes),
            f"{row.ratio_of_many:.3f}",
            row.how,
        )
    return table


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / _BYTES_PER_MIB:,.1f}"
