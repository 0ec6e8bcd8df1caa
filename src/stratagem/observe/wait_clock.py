"""Time that this process has waited, by what it waited for.

Code that waits adds to the clock of the process; the recorder of steps reads it before and after a
step. So a layer that waits needs to know nothing of events.
"""

from __future__ import annotations

import time
from typing import NamedTuple


class StepWaits(NamedTuple):
    """Seconds of consecutive steps in which a process waited. None is not measured.

    Args:
        waited_s: waited for devices and for other processes, including the others but `input_s`.
        idle_s: waited for a program that ran beside the host, which had nothing else to do.
        input_s: waited for its own data.
        peers_s: waited until the other processes arrived at a sum, or had their data.
        transfer_s: sent, received and added values after that.
    """

    waited_s: float | None = None
    idle_s: float | None = None
    input_s: float | None = None
    peers_s: float | None = None
    transfer_s: float | None = None

    def plus(self, other: StepWaits) -> StepWaits:
        """Adds the waits of later steps.

        Args:
            other: waits of the later steps.

        Returns:
            The sums; a time that either lacks is not measured.
        """
        pairs = zip(self, other, strict=True)
        return StepWaits(*(None if a is None or b is None else a + b for a, b in pairs))


class WaitClock:
    """Seconds waited since the process started.

    `programs_s` is the wait for programs, of which `idle_s` for those that ran beside the host.
    `sizes_s` is the time of exchanges of batch sizes in any thread. With `measures_transfers`, the
    waits in sums are counted exactly. `waits_for_data` is True while the program waits for its next
    batch.
    """

    def __init__(self) -> None:
        self.programs_s = self.idle_s = self.input_s = self.peers_s = self.transfer_s = 0.0
        self.sizes_s = 0.0
        self.measures_transfers = self.waits_for_data = False

    def read(self) -> StepWaits:
        """Returns the waits since the process started."""
        waited_s = self.programs_s + self.peers_s
        if not self.measures_transfers:
            return StepWaits(waited_s, self.idle_s, self.input_s, self.peers_s)
        waited_s += self.transfer_s
        return StepWaits(waited_s, self.idle_s, self.input_s, self.peers_s, self.transfer_s)

    def since(self, before: StepWaits) -> StepWaits:
        """Returns the waits after a reading."""
        return self.read().plus(StepWaits(*(one and -one for one in before)))


class DataWait:
    """Context in which the program waits for its next batch.

    The part of it in which processes exchanged the sizes of their batches is a wait for the others.
    A context inside of another one counts nothing.
    """

    def __init__(self, clock: WaitClock) -> None:
        self._clock = clock
        self._counts = False
        self._begin_s = self._sizes_s = 0.0

    def __enter__(self) -> None:
        self._counts = not self._clock.waits_for_data
        self._clock.waits_for_data = True
        self._begin_s, self._sizes_s = time.monotonic(), self._clock.sizes_s

    def __exit__(self, *error: object) -> None:
        if not self._counts:
            return
        self._clock.waits_for_data = False
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
