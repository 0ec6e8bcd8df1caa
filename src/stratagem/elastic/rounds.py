"""Rounds of a process with the members of its views, and the changes of these views."""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Generator, Sequence

from stratagem import logs
from stratagem.authentication import Credentials
from stratagem.authentication.gate import Gate
from stratagem.authentication.listening import listening_sockets
from stratagem.closing import Closing
from stratagem.elastic.admissions import Admissions
from stratagem.elastic.changes import ViewChanges
from stratagem.elastic.exchange_times import ExchangeTimes
from stratagem.elastic.group_messages import change_text, not_joined, waited_too_long
from stratagem.elastic.inbox import Inbox, Stage
from stratagem.elastic.pauses import TrainingPauses
from stratagem.elastic.peer_connections import PeerConnections, PeerLostError
from stratagem.elastic.reaching import PURPOSE, Peers
from stratagem.elastic.view_connections import connect_view
from stratagem.elastic.views import Report, View
from stratagem.process_group.identity import Identity
from stratagem.process_group.verdict import GroupLimits

__all__ = ["ElasticRounds", "STUCK_SETTING"]

_logger = logging.getLogger(__name__)
_PROBE_AFTER_S = 1.0
STUCK_SETTING = "STRATAGEM_STUCK_TIMEOUT_S"


class ElasticRounds(Closing):
    """A member of an elastic group, as far as rounds and views go; see `ElasticGroup`.

    It listens on construction, and has no view yet.
    """

    def __init__(
        self,
        identity: Identity,
        limits: GroupLimits,
        credentials: Credentials,
        *,
        num_spares: int = 0,
        prepares: bool = False,
    ) -> None:
        self._first, self.limits = identity, limits
        own = identity.process_id
        self._most = identity.num_processes - num_spares
        incarnation = secrets.randbits(62)
        self._inbox = Inbox(incarnation)
        host, port = identity.addresses[own]
        self._gate = Gate(
            listening_sockets(host, port, identity.hosts),
            credentials,
            self._inbox.admit,
            purpose=PURPOSE,
        )
        self._peers = Peers(
            own,
            identity.labels,
            identity.addresses,
            credentials,
            peer_s=limits.peer_s,
            incarnation=incarnation,
        )
        self._changes = ViewChanges(self._peers, self._inbox, limits, most=self._most)
        self.admissions = Admissions(self._inbox, own, most=self._most, prepares=prepares)
        self.is_candidate = self._rehearses = False
        tasks = _tasks_of(identity.labels)
        self._times = ExchangeTimes(tasks)
        self._pauses = TrainingPauses(tasks, most=self._most)
        self._connections: PeerConnections | None = None
        self._num_rounds = 0
        self._is_broken = self._is_complete = False
        self._is_step = False
        self._probed_s = 0.0
        self._listeners: list[Callable[[View], None]] = []
        self.participants: tuple[int, ...] = ()  # whose values the last committed round combines
        self._told = self.view = View(0, tuple(range(self._most)))
        self._limit_s, self._setting = limits.stuck_s, STUCK_SETTING

    @property
    def member(self) -> int:
        """Id of this process in the cluster."""
        return self._first.process_id

    @property
    def num_places(self) -> int:
        """Number of members if none is lost."""
        return self._most

    # Rounds.

    @contextlib.contextmanager
    def rehearsal(self) -> Generator[None]:
        """Ends rounds at once, without the others; none is committed. For one that will join."""
        assert self.is_candidate
        self._rehearses = True
        try:
            yield
        finally:
            self._rehearses = False

    def begin_round(self, name: str, *, is_step: bool = True) -> None:
        """Begins a round, of the same name on all members; RuntimeError before it has joined.

        One that `is_step` counts for the time of steps, and for the pauses between them.
        """
        if self._rehearses:
            self._is_broken = True
            return
        if self.is_candidate:
            raise not_joined(name)
        assert self._connections is not None
        self._is_broken = self._is_complete = False
        self._is_step = is_step
        self._connections.begin_round(self._num_rounds + 1, name)

    def operate(
        self, operation: Callable[[PeerConnections], None], *, follows_work: bool = True
    ) -> bool:
        """Runs an operation of the round; False if the round is broken.

        One that `follows_work` begins when this member has computed its values.

        Raises RuntimeError if this member has left.
        """
        self._inbox.check_open()
        if not self._is_broken:
            assert self._connections is not None
            try:
                self._times.begin_operation(follows_work=follows_work)
                operation(self._connections)
            except PeerLostError as error:
                _logger.info("A round is broken: %s.", error)
                self._inbox.check_open()  # another thread closes the connections
                self._is_broken = True
            finally:
                self._times.end_operation()
        return not self._is_broken

    def commit(self) -> bool:
        """Ends a round; False if no member has committed it. Changes a broken view."""
        if self._rehearses:
            return False
        self._is_complete = not self._is_broken
        before, view = self._num_rounds, self.view
        flags: list[int] = []
        own = self.admissions.flag(self.view)
        if self.operate(
            lambda connections: flags.extend(connections.barrier(own)), follows_work=False
        ):
            self._num_rounds += 1
            self._is_complete = False
            self.admissions.note(flags)
            ended_s = time.monotonic()
        else:
            ended_s = time.monotonic()  # of a step that counts: the change comes after it
            self._change()
        if self._num_rounds > before:
            self.participants = view.members
            if self._is_step:
                self._pauses.end_step(view.number, ended_s)
        return self._num_rounds > before

    def _change(self) -> None:
        begun_s = time.monotonic()
        before = self.view
        while True:
            self._inbox.check_open()
            if self._connections is not None:
                self._connections.close()
            report = Report(
                self.member,
                self.view.number,
                self._num_rounds,
                self._is_complete,
                self._peers.incarnation,
                self.admissions.is_new,
            )
            self.view = self._changes.next_view(self.view, report, self.admissions.safe)
            self.admissions.begin_view(self.view)
            self._num_rounds = self.view.num_rounds
            self._is_complete = False
            try:
                self._connect()
            except PeerLostError as error:
                _logger.info("A view is broken before its first round: %s.", error)
                continue
            break
        change_s = time.monotonic() - begun_s
        self._pauses.note_change(before, self.view, change_s)
        text = change_text(before, self.view, self._first.labels, most=self._most)
        logs.announce(_logger, f"{text} after {change_s:.3f} s.")

    def _connect(self) -> None:
        """Connects the members of the view; raises PeerLostError."""
        number, members = self.view.number, list(self.view.members)
        self._inbox.tell(stage=Stage.TRAINS, view=number, members=members)
        self._connections = connect_view(
            self.view, self._peers, self._inbox, self._check_view, self._times
        )

    def _check_view(self, waited_s: float) -> None:
        """Raises PeerLostError if the view is broken, and DeadlineExceededError if it is stuck."""
        self._inbox.check_open()
        if self._inbox.has_report():
            raise PeerLostError("another member reports a broken view")
        now_s = time.monotonic()
        if waited_s < _PROBE_AFTER_S or now_s - self._probed_s < _PROBE_AFTER_S:
            return
        for member in self.view.members:
            if member != self.member and self._peers.is_lost(member):
                raise PeerLostError(f"process {member} does not answer")
        self._probed_s = time.monotonic()
        if waited_s > self._limit_s:
            members = [self._first.labels[member] for member in self.view.members]
            own = self._first.label
            raise waited_too_long(own, members, waited_s, self._limit_s, self._setting)

    # Changes of the view.

    def on_change(self, listener: Callable[[View], None]) -> None:
        """Registers a function that `tell` calls after each change of the view."""
        self._listeners.append(listener)

    def tell(self) -> None:
        """Calls the listeners if the view has changed; call it between rounds."""
        if self._told is not self.view:
            self._told = self.view
            for listener in self._listeners:
                listener(self.view)

    def close(self) -> None:
        """Leaves the group; the others continue."""
        self._inbox.close()
        if self._connections is not None:
            self._connections.close()
        self._gate.close()


def _tasks_of(labels: Sequence[str]) -> dict[int, str]:
    """Returns the task of each process, without its address."""
    return {member: label.partition(" (")[0] for member, label in enumerate(labels)}
