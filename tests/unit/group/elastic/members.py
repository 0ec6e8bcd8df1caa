"""Members of one elastic group in threads of one process, for tests without JAX."""

from __future__ import annotations

import dataclasses
import itertools
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from stratagem.group.authentication.secret import Credentials
from stratagem.group.elastic.group import ElasticGroup
from stratagem.group.elastic.joining import TrainingState, hand_over, receive
from stratagem.group.elastic.peer_connections import ExchangeTimes, PeerConnections
from stratagem.group.verdict import GroupLimits
from stratagem.resources import Closing
from tests.unit.group.process_group.members import listed, together

# Far above what a busy machine needs: no test waits until they are over.
LIMITS = GroupLimits(join_s=300, peer_s=120, stuck_s=300, barrier_s=300)
PLACE = "loop"


def connected_peers(
    count: int, check: Callable[[float], None], times: Sequence[ExchangeTimes] = ()
) -> list[PeerConnections]:
    """Returns the connections of all members of a view, in one process."""
    sockets: list[dict[int, socket.socket]] = [{} for _ in range(count)]
    for one, other in itertools.combinations(range(count), 2):
        sockets[one][other], sockets[other][one] = socket.socketpair()
    return [
        PeerConnections(0, range(count), own, sockets[own], check, *times[own : own + 1])
        for own in range(count)
    ]


@dataclasses.dataclass
class Cluster(Closing):
    """Ports of the processes of one group."""

    ports: Sequence[int]
    limits: GroupLimits = LIMITS
    prepares: bool = False
    groups: list[ElasticGroup] = dataclasses.field(default_factory=list)

    def member(self, index: int) -> ElasticGroup:
        """Starts a process, again if one has been at its port before."""
        group = ElasticGroup(
            listed(index, self.ports), self.limits, Credentials(), prepares=self.prepares
        )
        self.groups.append(group)
        return group

    def started(self, count: int) -> list[ElasticGroup]:
        """Starts the first processes together."""
        return together(count, self.member)

    def close(self) -> None:
        """Ends all processes."""
        if self.groups:  # together: a member that leaves may wait for one that reads
            together(len(self.groups), lambda index: self.groups[index].close())


class Step(NamedTuple):
    """A committed step of a training: its participants, their sum, and the view it began in."""

    members: tuple[int, ...]
    total: float
    view: int


class Training:
    """A process that sums in rounds until `is_over`, and hands its log to those that join.

    `log` has the same steps on all. `is_over` is called with it before each step.
    """

    def __init__(
        self,
        group: ElasticGroup,
        is_over: Callable[[list[Step]], bool],
        *,
        may_retry: bool = False,
        in_handover: Callable[[], None] | None = None,
    ) -> None:
        self.group, self._is_over, self._may_retry = group, is_over, may_retry
        self._in_handover = in_handover
        self.log: list[Step] = []
        self.error: BaseException | None = None
        self._changed = threading.Condition()
        group.admissions.on_newcomers(self._deliver)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Waits for the end; raises the error of the training."""
        self._thread.join(120)
        assert not self._thread.is_alive(), self.log[-5:]
        if self.error is not None:
            raise self.error

    def until(self, condition: Callable[[list[Step]], bool]) -> None:
        """Waits for a condition on the log, which is looked at after each step."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.error or condition(self.log), 120)
        assert self.error is None

    def _run(self) -> None:
        try:
            if self.group.is_candidate and not self.group.join(PLACE, lambda running: False):
                return
            while not self._is_over(self.log):
                self._add(self._step())
        except BaseException as error:  # noqa: BLE001 - raised by `join`
            with self._changed:
                self.error = error
                self._changed.notify_all()
            self.group.close()

    def _add(self, step: Step) -> None:
        with self._changed:
            self.log.append(step)
            self._changed.notify_all()

    def _step(self) -> Step:
        group = self.group
        time.sleep(0.001)  # the other threads of this interpreter listen and answer
        group.admit(PLACE, may_retry=self._may_retry)
        own = np.full(20_000, 1 << group.member, np.float64)
        total = np.empty_like(own)
        while True:
            view = group.view.number
            group.begin_round("step")
            group.operate(lambda peers: peers.reduce(own, total, np.add))
            is_committed = group.commit()
            group.tell()
            if is_committed:
                return Step(group.participants, float(total[-1]), view)
            group.welcome()

    def _deliver(self, connections: PeerConnections, source: int, newcomers: Sequence[int]) -> None:
        if self._in_handover is not None:
            self._in_handover()
        own = self.group.member
        if own not in newcomers:
            hand_over(connections, source, newcomers, self._state if own == source else None)
            return
        received = receive(connections, source, newcomers, lambda document: None)
        self.log = [Step(tuple(one), *other) for one, *other in received.document["log"]]
        np.testing.assert_array_equal(received.arrays[0], np.arange(100_000))

    def _state(self) -> TrainingState:
        return TrainingState({"log": self.log}, [np.arange(100_000), np.float32(3)])


def members_of(log: list[Step]) -> list[tuple[int, ...]]:
    """Returns the participants of each step."""
    return [step.members for step in log]
