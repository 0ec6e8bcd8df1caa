"""Time of the operations of an elastic group: waiting for members, and values in transit.

An operation begins when this member has computed its values. It then waits until the last of the
others has sent its first bytes. The rest of the operation is sending, receiving and adding.

The first bytes of a member that is late come late, and all its values follow at once. Over a slow
link the first bytes come in time, and the values follow slowly.

With backup workers, the first operation of a step waits until enough members have arrived. One that
is left out waits for no member, only for values. The others do not wait for it, though its own work
takes longer. So the times of steps do not tell who holds up whom, and none are given as a whole.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from stratagem.observe.run_events.wait_clock import WaitClock, wait_clock


class ExchangeTimes:
    """Adds the times of operations to a clock; `tasks` has the name of each member's task.

    `waits_for_all` is False if a step may leave members out.
    """

    def __init__(
        self, tasks: Mapping[int, str], clock: WaitClock = wait_clock, *, waits_for_all: bool = True
    ) -> None:
        self._tasks, self._clock = tasks, clock
        self._begin_s = self._swap_s = self._waited_s = 0.0
        self._follows_work = self._counts_peers = False
        self._heard_s: dict[int, float] = {}
        clock.measures_transfers, clock.waits_for_all = True, waits_for_all

    def close(self) -> None:
        """Ends the measurement: later steps of this process may be those of another strategy."""
        self._clock.measures_transfers, self._clock.waits_for_all = False, True

    def begin_operation(self, *, follows_work: bool) -> None:
        """Begins an operation; one that does not follow own work waits for values in transit."""
        self._begin_s, self._waited_s = time.monotonic(), 0.0
        self._follows_work = self._counts_peers = follows_work

    def end_waiting(self) -> None:
        """Notes that all members that take part have arrived: the rest of it waits for values."""
        self._waited_s, self._counts_peers = time.monotonic() - self._begin_s, False

    def follow(self) -> None:
        """Notes that this member takes no part: it waits for values that others have combined."""
        self._follows_work = self._counts_peers = False

    def end_operation(self) -> None:
        """Ends it, also with an error."""
        self._clock.peers_s += self._waited_s
        self._clock.transfer_s += time.monotonic() - self._begin_s - self._waited_s

    def begin_swap(self) -> None:
        """Begins to swap buffers with the other members; an operation may do so twice."""
        self._swap_s = time.monotonic()
        self._heard_s.clear()

    def hear(self, peer: int) -> None:
        """Notes that bytes of a member have arrived."""
        if peer not in self._heard_s:
            self._heard_s[peer] = time.monotonic()

    def receive_all(self, peer: int) -> None:
        """Notes that all bytes of a member have arrived."""
        if not self._follows_work:
            return
        # All begin the second swap of an operation when the first is over: its delay counts, too.
        begin_s = self._heard_s.get(peer, self._swap_s) if self._counts_peers else self._swap_s
        task = self._tasks.get(peer, "")
        received_s = self._clock.received_s
        received_s[task] = received_s.get(task, 0.0) + time.monotonic() - begin_s

    def end_swap(self) -> None:
        """Ends the swap."""
        if self._counts_peers and self._heard_s:
            self._waited_s += max(self._heard_s.values()) - self._swap_s
        self._counts_peers = False
