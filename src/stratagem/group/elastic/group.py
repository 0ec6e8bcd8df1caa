"""`ElasticGroup`: processes that train together, go on without lost ones, and take in others.

Who speaks. Each process of the cluster listens at its address, on a port behind a gate. `peers` has
what others open there: data connections of a view, reports, probes, candidates that wait, and
requests for stacks from a member at a time limit. Nobody leads for long: the lowest member of a
view decides on the next one.

Rounds. A step is a round, and so is an exchange of values. A round is a number of operations, the
same on all members and in the same order, and a commit, which begins with a barrier. A member
enters the barrier when it has all values of the round. So one that has left the barrier proves that
all have all values; and if one lacks a value, none has left it.

A loss. The others find their connections to the lost member broken, or hear of it from those that
did. Each closes its connections of the view and reports to the lowest member that is left how many
rounds it has committed, and if it was in the barrier. If all have all values of the last round, it
counts for all, otherwise for none (`views.next_view`). The lowest member sends the next view to all
that have reported; if it is lost meanwhile, they report to the one after it. A view has connections
of its own, so that nothing of a broken round is left in them. A member whose port refuses
connections has ended. One that does not answer is lost after a limit, but may run on the other side
of a broken network: the others go on only if they are more than half of the view. If it comes back,
its report is refused.

Joining. A process that is started again has the id and the address of the one before, and another
incarnation, a random number that probes, reports and views carry. It asks the others. If one
trains, it is a candidate: it makes its model with its own values, compiles its step, and waits at
the lowest member. Each message of a barrier has a byte: the lowest member sets a bit if a candidate
waits, and all others if they have compiled the step for one member more. All see the same bytes of
the same round. Once all bits are set, they change the view at their next safe point, before a step,
as after a loss. The first round of the new view hands the state over, from the lowest member that
has it. If that member is lost, the round runs again and the next one sends it. If a candidate is
lost, the others go on as after any loss. If a loss breaks the first round after a safe point, the
next view takes those that wait as well.

Source: Birman and Joseph, Exploiting virtual synchrony in distributed systems, 1987.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import secrets
import time
from collections.abc import Callable, Generator
from typing import Any, NoReturn, TypeVar

from stratagem import logs
from stratagem.errors import DeadlineExceededError, explain
from stratagem.group.authentication.connections import decode, encode, listening_sockets
from stratagem.group.authentication.secret import Credentials, Gate
from stratagem.group.current import Identity
from stratagem.group.elastic.changes import GroupRunsError, TrainingPauses, ViewChanges
from stratagem.group.elastic.joining import Admissions, Candidacy, RunningGroup
from stratagem.group.elastic.peer_connections import ExchangeTimes, PeerConnections, PeerLostError
from stratagem.group.elastic.peers import PURPOSE, Inbox, Peers, Stage, connect_view
from stratagem.group.elastic.views import Report, View, change_text
from stratagem.group.verdict import Activity, GroupLimits
from stratagem.resources import Closing

_logger = logging.getLogger(__name__)
_Result = TypeVar("_Result")
_PROBE_AFTER_S = 1.0
_STUCK_SETTING = "STRATAGEM_STUCK_TIMEOUT_S"
# Exchanges before training: a process that has not joined yet has only its own values.
_BEFORE_TRAINING = ("the random state", "the initial values of ", "a call of ")


class ElasticGroup(Closing):
    """The group as one of its processes sees it. Joins on construction.

    `identity.addresses` has the address of each process, at which it listens. One thread at a time
    runs rounds.

    If the others train already, this process is a candidate until it calls `join`. With `prepares`,
    members admit others once `admissions.prepared_for` has the larger number of members on all.

    Raises DeadlineExceededError, naming the missing processes, if some do not start in time.
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
        self._inbox = Inbox(incarnation, identity.label)
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
        self._candidacy = Candidacy(self._peers, self._inbox, peer_s=limits.peer_s)
        self.admissions = Admissions(self._inbox, own, prepares=prepares)
        self.is_candidate = self._rehearses = False
        self._times = ExchangeTimes()
        tasks = [label.partition(" (")[0] for label in identity.labels]  # without addresses
        self._pauses = TrainingPauses(dict(enumerate(tasks)))
        self._connections: PeerConnections | None = None
        self._num_rounds = 0
        self._is_broken = self._is_complete = False
        self._is_step = False
        self._probed_s = 0.0
        self._listeners: list[Callable[[View], None]] = []
        self.participants: tuple[int, ...] = ()  # whose values the last committed round combines
        self._told = self.view = View(0, tuple(range(identity.num_processes)))
        self._limit_s, self._setting = limits.stuck_s, _STUCK_SETTING
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        try:
            self.view = self._told = self._changes.first_view(self.view.members)
        except GroupRunsError:
            self.is_candidate = self._peers.have_started = True
            self._inbox.tell(stage=Stage.WAITS)
            self.expect(self._candidacy.look())
        else:
            self._connect()
            self._pauses.begin(self.view)

    def close(self) -> None:
        """Leaves the group; the others continue."""
        self._gate.close()  # first: members that notice the rest find that it has ended
        self._inbox.close()
        self._disconnect()
        self._times.close()

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
            raise RuntimeError(
                explain(
                    f"{name!r} was called in a process that has not joined the others yet.",
                    expected="the values of the others, from which it continues.",
                    fix="call strategy.admit() before each step of a custom loop; fit joins by "
                    "itself.",
                )
            )
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

    def run_round(self, name: str, body: Callable[[PeerConnections], _Result]) -> _Result:
        """Returns what `body` returns in a round that is committed; it may run several times.

        Raises DivergedError if members made different calls, DeadlineExceededError if a member does
        not come.
        """
        results: list[_Result] = []
        participants = self.participants  # of the last step, which this is not
        while True:
            self.begin_round(name, is_step=False)
            self.operate(lambda connections: results.append(body(connections)))
            is_committed = self.commit()
            self.tell()
            if is_committed:
                self.participants = participants or self.participants
                return results[-1]

    # Changes of the view.

    def _change(self) -> None:
        begun_s = time.monotonic()
        before = self.view
        while True:
            self._inbox.check_open()
            self._disconnect()
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
        text = change_text(before, self.view, self._first.labels)
        logs.announce(_logger, f"{text} after {change_s:.3f} s.")

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
            self._inbox.print_stacks()
            self._peers.ask_for_stacks()
            members = ", ".join(self._first.labels[member] for member in self.view.members)
            raise DeadlineExceededError(
                explain(
                    f"{self._first.label} waited {waited_s:.0f} s for values of other members; all "
                    f"of {members} still run.",
                    expected=f"progress within {self._limit_s:g} s ({self._setting}).",
                    fix="check what the other processes do; raise the limit if a step takes that "
                    "long.",
                    code="SG508",
                )
            )

    def on_change(self, listener: Callable[[View], None]) -> None:
        """Registers a function that `tell` calls after each change of the view."""
        self._listeners.append(listener)

    def tell(self) -> None:
        """Calls the listeners if the view has changed; call it between rounds."""
        if self._told is not self.view:
            self._told = self.view
            for listener in self._listeners:
                listener(self.view)

    # Processes that join.

    def admit(self, place: str, *, may_retry: bool = False) -> None:
        """Admits candidates that wait at this place, if all members have agreed on that.

        Call it on every member, between rounds. With `may_retry`, candidates may also join if the
        next round is broken, after which `welcome` is called.
        """
        self.admissions.mark(place, self._num_rounds)
        while self.admissions.is_change_due:
            self._change()
            self.tell()
        self.welcome()
        self.admissions.mark(place, self._num_rounds if may_retry else None)

    def welcome(self) -> None:
        """Hands the state over to new members, if there are any."""
        had_newcomers = bool(self.admissions.newcomers)
        while self.admissions.newcomers:
            self.run_round(
                "the state for new members",
                lambda connections: self.admissions.hand_over(connections, self.view),
            )
            self.admissions.newcomers = ()
        safe = self.admissions.safe
        if had_newcomers and safe is not None:
            self.admissions.mark(safe.place, self._num_rounds)

    def expect(self, running: RunningGroup) -> bool:
        """Prepares a candidate for a group; returns True if that changes its number of members."""
        before = self.num_processes
        self.view = running.with_candidate(self.member)
        is_other = before != len(self.view.members)
        if is_other:
            self.tell()
        self._told = self.view
        return is_other

    def join(self, place: str, look: Callable[[RunningGroup], bool]) -> bool:
        """Waits until the members admit this process; returns False if `look` ends the wait.

        `look` is called with the group from time to time. Raises UnavailableError once all members
        have ended.
        """
        found = self._candidacy.wait(place, look)
        if found is None:
            return False
        begun_s = time.monotonic()
        self.view, self._num_rounds = found, found.num_rounds
        self.is_candidate = False
        self.admissions.begin_view(found)
        self.admissions.mark(place, found.num_rounds)
        try:
            self._connect()
        except PeerLostError as error:
            _logger.info("A view is broken before its first round: %s.", error)
            self._change()
        self._pauses.begin(self.view)
        self.tell()
        self.welcome()
        logs.announce(
            _logger,
            f"Joined as one of {self.num_processes} after {time.monotonic() - begun_s:.3f} s.",
        )
        return True

    # What code for any group uses; see `group.member.Group`.

    @property
    def identity(self) -> Identity:
        """This process among the members of the present view; process ids are ranks in it."""
        members = self._told.members
        return dataclasses.replace(
            self._first,
            process_id=members.index(self.member),
            labels=tuple(self._first.labels[member] for member in members),
            addresses=tuple(self._first.addresses[member] for member in members),
        )

    @property
    def num_processes(self) -> int:
        """Number of members."""
        return len(self._told.members)

    @property
    def process_id(self) -> int:
        """Rank of this process among the members; never 0 before it has joined."""
        rank = self._told.members.index(self.member)
        return max(1, rank) if self.is_candidate else rank

    @contextlib.contextmanager
    def at(self, kind: Activity, name: str) -> Generator[None]:
        """Does nothing: other members learn what this process does when they ask it."""
        del kind, name
        yield

    def wait_for_step(self, number: int, name: str, is_ready: Callable[[], bool]) -> None:
        """Waits until results are ready."""
        del number, name
        while not is_ready():
            time.sleep(0.0002)

    def exchange(
        self,
        name: str,
        value: object,
        *,
        timeout_s: float | None = None,
        setting: str = "STRATAGEM_BARRIER_TIMEOUT_S",
    ) -> list[Any]:
        """Sends a value to all members and returns theirs, by rank. Call on every member.

        Members that were lost meanwhile are left out. `timeout_s` and `setting` are as for
        `group.member.Group`. Raises as `run_round`.
        """
        if self.is_candidate and name.startswith(_BEFORE_TRAINING):
            return [value] * self.num_processes
        self.admissions.pass_by()
        content = json.dumps(encode(value), separators=(",", ":")).encode()

        def gather(connections: PeerConnections) -> dict[int, bytes]:
            return dict(zip(self.view.members, connections.gather(content), strict=True))

        limit_s = self.limits.barrier_s if timeout_s is None else timeout_s
        self._limit_s, self._setting = limit_s or math.inf, setting
        try:
            received = self.run_round(name, gather)
        finally:
            self._limit_s, self._setting = self.limits.stuck_s, _STUCK_SETTING
        members = [member for member in self.view.members if member in received]
        return [decode(json.loads(received[member])) for member in members]

    def listen(self, topic: str, listener: object) -> NoReturn:
        """Refuses agreements on a step, which a lost member would leave open."""
        del listener
        raise NotImplementedError(
            explain(
                f"{topic!r} was to be agreed on by the processes of an ElasticStrategy.",
                expected="no PreemptionCheckpointHandler and no BackupAndRestore: members that are "
                "left need no restart.",
                fix="save with keras.callbacks.ModelCheckpoint, or use "
                "MultiWorkerMirroredStrategy.",
            )
        )
