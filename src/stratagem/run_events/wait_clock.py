"""Time that this process has waited, by what it waited for.

Code that waits adds to the clock of the process; the recorder of steps reads it before and after a
step. So a layer that waits needs to know nothing of events.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping

__all__ = ["DataWait", "PeerSizesWait", "StepWaits", "WaitClock", "WaitReading", "wait_clock"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepWaits:
    """Seconds of consecutive steps in which a process waited. None is not measured.

    Args:
        waited_s: waited for devices and for other processes, including `peers_s` and `transfer_s`.
        input_s: waited for its own data.
        peers_s: waited until the other processes arrived at a sum, or had their data.
        transfer_s: sent, received and added values after that.
        received_s: by task, the time in which its values arrived.

    Example:
        >>> waits = sg.goodput.StepWaits(waited_s=0.3, input_s=0.1)
        >>> waits.plus(waits)
        StepWaits(waited_s=0.6, input_s=0.2, peers_s=None, transfer_s=None, received_s=None)

    Source: specific to Stratagem.
    """

    waited_s: float | None = None
    input_s: float | None = None
    peers_s: float | None = None
    transfer_s: float | None = None
    received_s: Mapping[str, float] | None = None

    def plus(self, other: StepWaits) -> StepWaits:
        """Adds the waits of later steps.

        Args:
            other: waits of the later steps.

        Returns:
            The sums; a time that either lacks is not measured.
        """
        received_s = None
        if self.received_s is not None and other.received_s is not None:
            received_s = dict(self.received_s)
            for task, time_s in other.received_s.items():
                received_s[task] = received_s.get(task, 0.0) + time_s
        return StepWaits(
            waited_s=_sum(self.waited_s, other.waited_s),
            input_s=_sum(self.input_s, other.input_s),
            peers_s=_sum(self.peers_s, other.peers_s),
            transfer_s=_sum(self.transfer_s, other.transfer_s),
            received_s=received_s,
        )


def _sum(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one + other


@dataclasses.dataclass(frozen=True, slots=True)
class WaitReading:
    """Totals of a clock at one moment."""

    programs_s: float
    input_s: float
    peers_s: float
    transfer_s: float
    received_s: Mapping[str, float]


class WaitClock:
    """Seconds waited since the process started.

    `programs_s` is the wait for programs, `sizes_s` the time of exchanges of batch sizes in any
    thread, and `received_s` has the time in which values of each task arrived. With
    `measures_transfers`, the waits in sums are counted exactly.
    """

    def __init__(self) -> None:
        self.programs_s = self.input_s = self.peers_s = self.transfer_s = self.sizes_s = 0.0
        self.received_s: dict[str, float] = {}
        self.measures_transfers = False

    @property
    def waited_s(self) -> float:
        """Wait for devices and other processes."""
        return self.programs_s + self.peers_s + self.transfer_s

    def read(self) -> WaitReading:
        """Returns the totals so far."""
        return WaitReading(
            self.programs_s, self.input_s, self.peers_s, self.transfer_s, dict(self.received_s)
        )

    def since(self, before: WaitReading) -> StepWaits:
        """Returns the waits after a reading."""
        peers_s = self.peers_s - before.peers_s
        transfer_s = self.transfer_s - before.transfer_s
        received_s = {
            task: time_s - before.received_s.get(task, 0.0)
            for task, time_s in dict(self.received_s).items()  # another thread adds
        }
        return StepWaits(
            waited_s=self.programs_s - before.programs_s + peers_s + transfer_s,
            input_s=self.input_s - before.input_s,
            peers_s=peers_s,
            transfer_s=transfer_s if self.measures_transfers else None,
            received_s=received_s if self.measures_transfers else None,
        )


class DataWait:
    """Context in which the program waits for its next batch.

    The part of it in which processes exchanged the sizes of their batches is a wait for the others.
    """

    def __init__(self, clock: WaitClock) -> None:
        self._clock = clock
        self._begin_s = self._sizes_s = 0.0

    def __enter__(self) -> None:
        self._begin_s, self._sizes_s = time.monotonic(), self._clock.sizes_s

    def __exit__(self, *error: object) -> None:
        waited_s = time.monotonic() - self._begin_s
        peers_s = min(waited_s, self._clock.sizes_s - self._sizes_s)
        self._clock.input_s += waited_s - peers_s
        self._clock.peers_s += peers_s


class PeerSizesWait:
    """Context in which a thread waits for the batch sizes of other processes."""

    def __init__(self, clock: WaitClock) -> None:
        self._clock = clock
        self._begin_s = 0.0

    def __enter__(self) -> None:
        self._begin_s = time.monotonic()

    def __exit__(self, *error: object) -> None:
        self._clock.sizes_s += time.monotonic() - self._begin_s


wait_clock = WaitClock()
"""The clock of this process."""
