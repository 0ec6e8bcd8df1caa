"""Rounds of a process with the members of its views, and the changes of these views."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import secrets
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np

from stratagem import logs
from stratagem.closing import Closing
from stratagem.group.authentication.credentials import Credentials
from stratagem.group.authentication.gate import Gate
from stratagem.group.authentication.listening import listening_sockets
from stratagem.group.elastic.admissions import Admissions
from stratagem.group.elastic.backed_rounds import BackedRounds
from stratagem.group.elastic.changes import ViewChanges
from stratagem.group.elastic.control_connections import connect_controls
from stratagem.group.elastic.exchange_times import ExchangeTimes
from stratagem.group.elastic.group_messages import change_text, not_joined, waited_too_long
from stratagem.group.elastic.inbox import Inbox, Stage
from stratagem.group.elastic.pauses import TrainingPauses
from stratagem.group.elastic.peer_connections import PeerConnections, PeerLostError
from stratagem.group.elastic.reaching import PURPOSE, Peers
from stratagem.group.elastic.view_connections import connect_view
from stratagem.group.elastic.views import Report, View
from stratagem.group.identity import Identity
from stratagem.group.verdict import GroupLimits

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
        num_backups: int = 0,
        num_spares: int = 0,
        prepares: bool = False,
    ) -> None:
        self._first, self.limits = identity, limits
        own = identity.process_id
        self._most = identity.num_processes - num_spares
        incarnation = secrets.randbits(62)
        self._inbox = Inbox(incarnation, num_backups)
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
        self._times = ExchangeTimes(tasks, waits_for_all=not num_backups)
        self._pauses = TrainingPauses(tasks, most=self._most)
        self._connections: PeerConnections | None = None
        self.num_backups = num_backups
        self._backing = BackedRounds(own, num_backups) if num_backups else None
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

    def begin_round(
        self,
        name: str,
        *,
        is_step: bool = True,
        is_backed: bool = False,
        lengths: Sequence[int] | None = None,
    ) -> None:
        """Begins a round, of the same name on all members; RuntimeError before it has joined.

        One that `is_step` counts for the time of steps, and for the pauses between them. If it is
        backed, members that are late are left out: sums of floats then stand for the rows of all.
        `lengths` are the rows of each member, or None if all have as many.
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
        if self._backing is not None and is_backed:
            self._backing.begin(self._num_rounds + 1, lengths)
        elif self._backing is not None:
            self._backing.end()

    def is_late(self) -> bool:
        """Returns True if the others have begun the next round without this member."""
        return self._backing is not None and self._backing.is_chosen(self._num_rounds + 1)

    def operate(
        self,
        operation: Callable[[PeerConnections], None],
        result: np.ndarray[Any, Any] | None = None,
        *,
        follows_work: bool = True,
    ) -> bool:
        """Runs an operation of the round, with its result; False if the round is broken.

        One that `follows_work` begins when this member has computed its values. In a backed round
        that leaves this member out, it receives the result instead.

        Raises RuntimeError if this member has left.
        """
        self._inbox.check_open()
        if not self._is_broken:
            assert self._connections is not None
            try:
                self._times.begin_operation(follows_work=follows_work)
                if result is None or self._backing is None or self._backing.participants is None:
                    operation(self._connections)
                else:
                    self._backing.run(operation, result)
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
        backing, before, view = self._backing, self._num_rounds, self.view
        participants = (None if backing is None else backing.participants) or view.members
        # A member that is late has the results only after the others have left the barrier.
        self._is_complete = not self._is_broken and (backing is None or not backing.is_late)
        flags: list[int] = []
        own = self.admissions.flag(self.view)

        def finish(connections: PeerConnections) -> None:
            if backing is None or not backing.receive_if_late():
                flags.extend(connections.barrier(own))

        if self.operate(finish, follows_work=False):
            self._count_round(send=True)
            self._is_complete = False
            if backing is None:  # with backup workers, no process joins
                self.admissions.note(flags)
            ended_s = time.monotonic()
        else:
            ended_s = time.monotonic()  # of a step that counts: the change comes after it
            self._change()
        if self._num_rounds > before:
            self.participants = participants
            if self._is_step:
                self._pauses.end_step(view.number, ended_s)
        return self._num_rounds > before

    def _count_round(self, *, send: bool) -> None:
        self._num_rounds += 1
        if self._backing is not None:
            self._backing.commit(self._num_rounds, send=send)

    @property
    def has_taken_part(self) -> bool:
        """True if the last committed round combines values of this member."""
        return self.member in self.participants

    def _change(self) -> None:
        begun_s = time.monotonic()
        before = self.view
        while True:
            self._inbox.check_open()
            self._disconnect()
            self.view = self._changes.next_view(self.view, self._report(), self.admissions.safe)
            self.admissions.begin_view(self.view)
            if dict(self.view.behind).get(self.member, self.view.num_rounds) > self._num_rounds:
                self._count_round(send=False)
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

    def _report(self) -> Report:
        return Report(
            self.member,
            self.view.number,
            self._num_rounds,
            self._is_complete,
            self._peers.incarnation,
            self.admissions.is_new,
            (None if self._backing is None else self._backing.participants) or (),
            self.num_backups,
        )

    def _disconnect(self) -> None:
        if self._backing is not None:
            self._backing.end_view()
        if self._connections is not None:
            self._connections.close()

    def _connect(self) -> None:
        """Connects the members of the view; raises PeerLostError."""
        number, members = self.view.number, list(self.view.members)
        self._inbox.tell(stage=Stage.TRAINS, view=number, members=members)
        self._connections = connect_view(
            self.view, self._peers, self._inbox, self._check_view, self._times
        )
        if self._backing is not None:
            self._connect_controls(self._backing, self._connections)

    def _connect_controls(self, backing: BackedRounds, connections: PeerConnections) -> None:
        check = self._check_view
        with contextlib.ExitStack() as stack:
            controls = connect_controls(self.view, self._peers, self._inbox, check, stack)
            stack.callback(backing.end_view)
            backing.begin_view(self.view, connections, controls, check)
            self._inbox.check_open()
            stack.pop_all()

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
        """Calls the listeners if the view has changed; call it between rounds.

        A member that lacks rounds of earlier views commits those first, with the members of then.
        """
        backing, view = self._backing, self.view
        members = None if backing is None else backing.members_of(self._num_rounds + 1)
        if members is not None:
            same = members == self._told.members
            view = self._told if same else dataclasses.replace(view, members=members)
        if self._told is not view:
            self._told = view
            for listener in self._listeners:
                listener(view)

    def close(self) -> None:
        """Leaves the group; the others continue."""
        if self._backing is not None:
            self._backing.finish(self._num_rounds, self.limits.peer_s)
        self._gate.close()  # first: members that notice the rest find that it has ended
        self._inbox.close()
        self._disconnect()
        self._times.close()


def _tasks_of(labels: Sequence[str]) -> dict[int, str]:
    """Returns the task of each process, without its address."""
    return {member: label.partition(" (")[0] for member, label in enumerate(labels)}
