"""`ElasticGroup`: a process among those that train together, as seen from itself."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import socket
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, NoReturn, TypeVar

import numpy as np

from stratagem import logs
from stratagem.authentication import Credentials
from stratagem.authentication.gate import Gate
from stratagem.authentication.listening import listening_sockets
from stratagem.closing import Closing
from stratagem.elastic.backed_rounds import BackedRounds
from stratagem.elastic.changes import ViewChanges
from stratagem.elastic.control_connections import connect_controls
from stratagem.elastic.peer_connections import PeerConnections, PeerLostError
from stratagem.elastic.reaching import PURPOSE, Inbox, Peers
from stratagem.elastic.views import Report, View
from stratagem.errors import DeadlineExceededError
from stratagem.messages import explain
from stratagem.process_group.identity import Identity
from stratagem.process_group.verdict import Activity, GroupLimits
from stratagem.process_group.wire import decode, encode

__all__ = ["ElasticGroup"]

_logger = logging.getLogger(__name__)
_Result = TypeVar("_Result")
_PROBE_AFTER_S = 1.0
_STUCK_SETTING = "STRATAGEM_STUCK_TIMEOUT_S"


class ElasticGroup(Closing):
    """The processes that train together and continue without lost ones. Joins on construction.

    `identity.addresses` has the address of each process, at which it listens.

    A round is a number of operations and a commit. If a member is lost before all have the values
    of a round, no member commits it. One thread at a time runs rounds. With `num_backups`, so many
    members may be left out of a round that allows it; they commit its results later.

    Raises DeadlineExceededError, naming the missing processes, if some do not start in time.
    """

    def __init__(
        self,
        identity: Identity,
        limits: GroupLimits,
        credentials: Credentials,
        num_backups: int = 0,
    ) -> None:
        self._first, self.limits = identity, limits
        own = identity.process_id
        self._inbox = Inbox()
        host, port = identity.addresses[own]
        self._gate = Gate(
            listening_sockets(host, port, identity.hosts),
            credentials,
            self._inbox.admit,
            purpose=PURPOSE,
        )
        self._peers = Peers(
            own, identity.labels, identity.addresses, credentials, peer_s=limits.peer_s
        )
        self._changes = ViewChanges(
            self._peers,
            self._inbox,
            peer_s=limits.peer_s,
            start_s=limits.join_s,
            stuck_s=limits.stuck_s,
        )
        self._connections: PeerConnections | None = None
        self.num_backups = num_backups
        self._backing = BackedRounds(own, num_backups) if num_backups else None
        self._num_rounds = 0
        self._is_broken = False
        self._is_complete = False
        self._probed_s = 0.0
        self._listeners: list[Callable[[View], None]] = []
        self.participants: tuple[int, ...] = ()  # whose values the last committed round combines
        self._told = self.view = View(0, tuple(range(identity.num_processes)))
        self._limit_s, self._setting = limits.stuck_s, _STUCK_SETTING
        try:
            self.view = self._told = self._changes.first_view(self.view.members, num_backups)
            self._connect()
        except BaseException:
            self.close()
            raise

    # What code for any group uses; see `process_group.Group`.

    @property
    def identity(self) -> Identity:
        """This process among the members of the present view; process ids are ranks in it."""
        members = self._told.members
        return dataclasses.replace(
            self._first,
            process_id=members.index(self._first.process_id),
            labels=tuple(self._first.labels[member] for member in members),
            addresses=tuple(self._first.addresses[member] for member in members),
        )

    @property
    def num_processes(self) -> int:
        """Number of members."""
        return len(self._told.members)

    @property
    def process_id(self) -> int:
        """Rank of this process among the members."""
        return self._told.members.index(self._first.process_id)

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
        `process_group.Group`. Raises as `run_round`.
        """
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

    # Rounds.

    def run_round(self, name: str, body: Callable[[PeerConnections], _Result]) -> _Result:
        """Returns what `body` returns in a round that is committed; it may run several times.

        Raises DivergedError if members made different calls, DeadlineExceededError if a member does
        not come.
        """
        results: list[_Result] = []
        participants = self.participants  # of the last step, which this is not
        while True:
            self.begin_round(name)
            self.operate(lambda connections: results.append(body(connections)))
            is_committed = self.commit()
            self.tell()
            if is_committed:
                self.participants = participants or self.participants
                return results[-1]

    def begin_round(
        self, name: str, *, is_backed: bool = False, lengths: Sequence[int] | None = None
    ) -> None:
        """Begins a round, of the same name on all members.

        If it is backed, members that are late are left out: sums of floats then stand for the rows
        of all. `lengths` are the rows of each member, or None if all have as many.
        """
        assert self._connections is not None
        self._is_broken = self._is_complete = False
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
    ) -> bool:
        """Runs an operation of the round, with its result; False if the round is broken.

        In a backed round that leaves this member out, it receives the result instead.

        Raises RuntimeError if this member has left.
        """
        self._inbox.check_open()
        if not self._is_broken:
            assert self._connections is not None
            try:
                if result is None or self._backing is None or self._backing.participants is None:
                    operation(self._connections)
                else:
                    self._backing.run(operation, result)
            except PeerLostError as error:
                _logger.info("A round is broken: %s.", error)
                self._inbox.check_open()  # another thread closes the connections
                self._is_broken = True
        return not self._is_broken

    def commit(self) -> bool:
        """Ends a round; False if no member has committed it. Changes a broken view."""
        backing, before = self._backing, self._num_rounds
        participants = self.view.members
        if backing is not None and backing.participants is not None:
            participants = backing.participants
        is_late = backing is not None and backing.is_late
        self._is_complete = not self._is_broken and not is_late
        # One that is late has its results only after the others have left the barrier.
        finish = PeerConnections.barrier if backing is None else backing.finish_round
        if self.operate(finish):
            self._count_round(send=True)
        else:
            self._change()
        if self._num_rounds > before:
            self.participants = participants
        return self._num_rounds > before

    def _count_round(self, *, send: bool) -> None:
        self._num_rounds += 1
        if self._backing is not None:
            self._backing.commit(self._num_rounds, send=send)

    @property
    def has_taken_part(self) -> bool:
        """True if the last committed round combines values of this member."""
        return self._first.process_id in self.participants

    def _change(self) -> None:
        begun_s, own = time.monotonic(), self._first.process_id
        lost_from = self.view.members
        while True:
            self._inbox.check_open()
            self._disconnect()
            self.view = self._changes.next_view(self.view, self._report())
            if dict(self.view.behind).get(own, self.view.num_rounds) > self._num_rounds:
                self._count_round(send=False)
            self._is_complete = False
            try:
                self._connect()
            except PeerLostError as error:
                _logger.info("A view is broken before its first round: %s.", error)
                continue
            break
        lost = [self._first.labels[one] for one in lost_from if one not in self.view.members]
        logs.announce(
            _logger,
            f"Lost {', '.join(lost) or 'a connection, and no member'}: {len(self.view.members)} of "
            f"{len(self._first.labels)} continue after {time.monotonic() - begun_s:.3f} s.",
        )

    def _report(self) -> Report:
        chosen = () if self._backing is None else self._backing.participants or ()
        own, count, is_complete = self._first.process_id, self._num_rounds, self._is_complete
        return Report(own, self.view.number, count, is_complete, chosen, self.num_backups)

    def _disconnect(self) -> None:
        if self._backing is not None:
            self._backing.end_view()
        if self._connections is not None:
            self._connections.close()

    def _connect(self) -> None:
        """Connects the members of a view; raises PeerLostError."""
        view, own = self.view, self._first.process_id
        self._inbox.begin_view(view.number, view.members)
        with contextlib.ExitStack() as stack:
            sockets: dict[int, socket.socket] = {}
            try:
                for member in view.members:
                    if member < own:
                        connection = self._peers.dial_data(member, view.number)
                        sockets[member] = stack.enter_context(connection)
            except OSError as error:
                raise PeerLostError(str(error)) from error
            for member in view.members:
                if member > own:
                    sockets[member] = stack.enter_context(self._awaited(member))
            self._connections = PeerConnections(
                view.number, view.members, own, sockets, self._check_view
            )
            if self._backing is not None:
                controls = connect_controls(view, self._peers, self._inbox, self._check_view, stack)
                stack.callback(self._backing.end_view)
                self._backing.begin_view(view, self._connections, controls, self._check_view)
            self._inbox.check_open()
            stack.pop_all()
        self._peers.have_started = True

    def _awaited(self, member: int) -> socket.socket:
        """Returns the connection that a member opens for the present view."""
        begun_s = time.monotonic()
        while (connection := self._inbox.take_data(self.view.number, member)) is None:
            with self._inbox.changed:
                self._inbox.changed.wait(0.01)
            self._check_view(time.monotonic() - begun_s)
        return connection

    def _check_view(self, waited_s: float) -> None:
        """Raises PeerLostError if the view is broken, and DeadlineExceededError if it is stuck."""
        self._inbox.check_open()
        if self._inbox.has_report():
            raise PeerLostError("another member reports a broken view")
        now_s = time.monotonic()
        if waited_s < _PROBE_AFTER_S or now_s - self._probed_s < _PROBE_AFTER_S:
            return
        for member in self.view.members:
            if member != self._first.process_id and self._peers.is_lost(member):
                raise PeerLostError(f"process {member} does not answer")
        self._probed_s = time.monotonic()
        if waited_s > self._limit_s:
            members = [self._first.labels[member] for member in self.view.members]
            raise DeadlineExceededError(
                explain(
                    f"{self._first.label} waited {waited_s:.0f} s for values of other members; all "
                    f"of {', '.join(members)} still run.",
                    expected=f"progress within {self._limit_s:g} s ({self._setting}).",
                    fix="check what the other processes do; raise the limit if a step takes that "
                    "long.",
                    code="SG508",
                )
            )

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
