"""Rounds of a process with the members of its views, and the changes of these views."""

from __future__ import annotations

import collections
import contextlib
import logging
import secrets
import socket
import statistics
import time
from collections.abc import Callable, Generator, Mapping, Sequence

from stratagem import logs
from stratagem.group.authentication.listening import listening_sockets
from stratagem.group.authentication.secret import Credentials, Gate
from stratagem.group.current import Identity
from stratagem.group.elastic.changes import SafePoint, ViewChanges
from stratagem.group.elastic.inbox import PURPOSE, Inbox, Peers, Stage
from stratagem.group.elastic.peer_connections import (
    Brokenness,
    ExchangeTimes,
    PeerConnections,
    PeerLostError,
)
from stratagem.group.elastic.views import Report, View, change_text, not_joined, waited_too_long
from stratagem.group.verdict import GroupLimits
from stratagem.observe.run_events.process_writer import current_events
from stratagem.observe.run_events.records import MembersEvent
from stratagem.observe.run_events.writer import EventWriter
from stratagem.resources import Closing

# Connections of a new view: each member dials those with lower ids, and awaits the others.

_VIEW_POLL_S = 0.01


def connect_view(
    view: View, peers: Peers, inbox: Inbox, check: Brokenness, times: ExchangeTimes | None = None
) -> PeerConnections:
    """Connects the members of a view; raises PeerLostError."""
    own = peers.own
    peers.expected = view.expected
    inbox.begin_view(view.number, view.expected)
    with contextlib.ExitStack() as stack:
        sockets: dict[int, socket.socket] = {}
        try:
            for member in view.members:
                if member < own:
                    connection = peers.dial_data(member, view.number)
                    sockets[member] = stack.enter_context(connection)
        except OSError as error:
            raise PeerLostError(str(error)) from error
        for member in view.members:
            if member > own:
                connection = _awaited(member, view, inbox, check)
                sockets[member] = stack.enter_context(connection)
        connections = PeerConnections(view.number, view.members, own, sockets, check, times)
        inbox.check_open()
        stack.pop_all()
    peers.have_started = True
    return connections


def _awaited(member: int, view: View, inbox: Inbox, check: Brokenness) -> socket.socket:
    """Returns the connection that a member opens for a view."""
    begun_s = time.monotonic()
    while (connection := inbox.take_data(view.number, member)) is None:
        with inbox.changed:
            inbox.changed.wait(_VIEW_POLL_S)
        check(time.monotonic() - begun_s)
    return connection


# Pauses of training while the members of an elastic group change, as events of the run.
#
# A pause begins when the last step before a change ends, and is over when the first step of the new
# members ends, less the median time of a step before. Changes without a step in between share a
# pause, and are one event.

_NUM_STEPS = 100


class TrainingPauses:
    """Records the first members of a group, and each change of them.

    `tasks` has the name of each process's task.
    """

    def __init__(
        self,
        tasks: Mapping[int, str],
        find_events: Callable[[], EventWriter | None] = current_events,
    ) -> None:
        self._tasks, self._find_events = tasks, find_events
        self._steps_s: collections.deque[float] = collections.deque(maxlen=_NUM_STEPS)
        self._ended_s: float | None = None
        self._clear()

    def _clear(self) -> None:
        self._view: View | None = None
        self._lost: list[str] = []
        self._joined: list[str] = []
        self._change_s = 0.0

    def begin(self, view: View) -> None:
        """Records the members with whom this process begins."""
        if self._view is None:  # else the first step records the change
            self._write(view, time.monotonic(), None, None)

    def note_change(self, before: View, after: View, change_s: float) -> None:
        """Notes a change of the view, which took `change_s`; it is recorded with the next step."""
        old, new = before.expected.items(), after.expected.items()
        self._lost += [self._tasks[member] for member, _ in sorted(old - new)]
        self._joined += [self._tasks[member] for member, _ in sorted(new - old)]
        self._change_s += change_s
        self._view = after

    def end_step(self, number: int, end_s: float) -> None:
        """Takes the end of a step in view `number`; `end_s` is on the monotonic clock."""
        before_s, self._ended_s = self._ended_s, end_s
        view = self._view
        if view is None:
            if before_s is not None:
                self._steps_s.append(end_s - before_s)
        elif number >= view.number:
            step_s = statistics.median(self._steps_s) if self._steps_s else None
            pause_s = None
            if before_s is not None and step_s is not None:
                pause_s = max(0.0, end_s - before_s - step_s)
            self._write(view, end_s, pause_s, step_s)
            self._clear()

    def _write(self, view: View, end_s: float, pause_s: float | None, step_s: float | None) -> None:
        events = self._find_events()
        if events is not None:
            events.members(
                MembersEvent(
                    time_s=time.time() - time.monotonic() + end_s,
                    monotonic_s=end_s,
                    view=view.number,
                    lost=list(self._lost),
                    joined=list(self._joined),
                    num_members=len(view.members),
                    num_expected=len(self._tasks),
                    change_s=self._change_s,
                    pause_s=pause_s,
                    step_s=step_s,
                )
            )


# Agreement of the members of a view on when they admit others.

_WANTED, _PREPARED = 1, 2
_NO_ROUND = -1

Delivery = Callable[[PeerConnections, int, Sequence[int]], None]
"""Called with the connections of a view, the member that sends the state, and the newcomers."""


class Admissions:
    """Flags of the members in each commit, and the conclusion that all draw.

    The lowest member says that it wants a change if a candidate waits. Each member says if it is
    prepared for one member more. All see the same answers in the same round. If all are prepared,
    they change the view at their next safe point.
    """

    def __init__(self, inbox: Inbox, own: int, *, prepares: bool) -> None:
        self._inbox, self._own, self._prepares = inbox, own, prepares
        self.prepared_for = 0
        self.wanted_size: int | None = None
        self.is_change_due = False
        self.newcomers: tuple[int, ...] = ()
        self.safe: SafePoint | None = None
        self._num_calls = 0
        self._deliver: Delivery | None = None

    def on_newcomers(self, deliver: Delivery) -> None:
        """Registers the function by which all members hand the state over to newcomers."""
        self._deliver = deliver

    def begin_call(self) -> int:
        """Counts a call in which processes can join; returns its number, from 1 on."""
        self._num_calls += 1
        self._inbox.tell(num_calls=self._num_calls)
        return self._num_calls

    def mark(self, place: str, num_rounds: int | None) -> None:
        """Marks a place at which processes can join.

        If a loss breaks the next round, the view after it can have them, if `num_rounds` are
        committed then.
        """
        is_other = self.safe is None or self.safe.place != place
        self.safe = SafePoint(place, _NO_ROUND if num_rounds is None else num_rounds)
        if is_other:
            self._inbox.tell(place=place)

    def pass_by(self) -> None:
        """Notes that a round follows which is no step: processes that join do not take part."""
        if self.safe is not None:
            self.mark(self.safe.place, None)

    def end_place(self) -> None:
        """Ends the place at which processes could join."""
        self.safe, self.is_change_due = None, False
        self._inbox.tell(place=None)

    def hand_over(self, connections: PeerConnections, view: View) -> None:
        """Hands the state over to newcomers, in a round."""
        source = next((one for one in view.members if one not in self.newcomers), None)
        if self.newcomers and source is not None and self._deliver is not None:
            self._deliver(connections, source, self.newcomers)

    @property
    def is_new(self) -> bool:
        """True if this process has joined without having the state of the others yet."""
        return self._own in self.newcomers

    def begin_view(self, view: View) -> None:
        """Starts again for other members."""
        self.newcomers, self.is_change_due = view.newcomers, view.is_change_due
        self.wanted_size = None

    def flag(self, view: View) -> int:
        """Returns this member's part of a commit."""
        size = len(view.members) + 1
        is_prepared = not self._prepares or self.prepared_for == size
        flag = _PREPARED if is_prepared else 0
        place = None if self.safe is None else self.safe.place
        if self._own == view.members[0] and self._inbox.has_candidate(place, view.members):
            flag |= _WANTED
        return flag

    def note(self, flags: Sequence[int]) -> None:
        """Takes what all members have said in a commit, by rank."""
        is_wanted = bool(flags[0] & _WANTED)
        self.wanted_size = len(flags) + 1 if is_wanted else None
        self.is_change_due = is_wanted and all(flag & _PREPARED for flag in flags)


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
        prepares: bool = False,
    ) -> None:
        self._first, self.limits = identity, limits
        own = identity.process_id
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
        self._changes = ViewChanges(self._peers, self._inbox, limits)
        self.admissions = Admissions(self._inbox, own, prepares=prepares)
        self.is_candidate = self._rehearses = False
        self._times = ExchangeTimes()
        self._pauses = TrainingPauses(_tasks_of(identity.labels))
        self._connections: PeerConnections | None = None
        self._num_rounds = 0
        self._is_broken = self._is_complete = False
        self._is_step = False
        self._probed_s = 0.0
        self._listeners: list[Callable[[View], None]] = []
        self.participants: tuple[int, ...] = ()  # whose values the last committed round combines
        self._told = self.view = View(0, tuple(range(identity.num_processes)))
        self._limit_s, self._setting = limits.stuck_s, STUCK_SETTING

    @property
    def member(self) -> int:
        """Id of this process in the cluster."""
        return self._first.process_id

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

        One that `follows_work` begins when this member has computed its values. Raises RuntimeError
        if this member has left.
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
        before, view = self._num_rounds, self.view
        self._is_complete = not self._is_broken
        flags: list[int] = []
        own = self.admissions.flag(view)
        if self.operate(lambda peers: flags.extend(peers.barrier(own)), follows_work=False):
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
            self._disconnect()
            self.view = self._changes.next_view(self.view, self._report(), self.admissions.safe)
            self.admissions.begin_view(self.view)
            self._num_rounds = self.view.num_rounds  # the last round counts for all or for none
            self._is_complete = False
            try:
                self._connect()
            except PeerLostError as error:
                _logger.info("A view is broken before its first round: %s.", error)
                continue
            break
        change_s = time.monotonic() - begun_s
        self._pauses.note_change(before, self.view, change_s)
        text = change_text(before, self.view, self._first.labels)
        logs.announce(_logger, f"{text} after {change_s:.3f} s.")

    def _report(self) -> Report:
        return Report(
            self.member,
            self.view.number,
            self._num_rounds,
            self._is_complete,
            self._peers.incarnation,
            self.admissions.is_new,
        )

    def _disconnect(self) -> None:
        if self._connections is not None:
            self._connections.close()

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
        self._gate.close()  # first: members that notice the rest find that it has ended
        self._inbox.close()
        self._disconnect()
        self._times.close()


def _tasks_of(labels: Sequence[str]) -> dict[int, str]:
    """Returns the task of each process, without its address."""
    return {member: label.partition(" (")[0] for member, label in enumerate(labels)}
