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

from stratagem import logs
from stratagem.authentication import Credentials
from stratagem.authentication.gate import Gate
from stratagem.authentication.listening import listening_sockets
from stratagem.closing import Closing
from stratagem.elastic.changes import ViewChanges
from stratagem.elastic.exchange_times import ExchangeTimes
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
    of a round, no member commits it. One thread at a time runs rounds.

    Raises DeadlineExceededError, naming the missing processes, if some do not start in time.
    """

    def __init__(self, identity: Identity, limits: GroupLimits, credentials: Credentials) -> None:
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
        self._times = ExchangeTimes(_tasks_of(identity.labels))
        self._connections: PeerConnections | None = None
        self._num_rounds = 0
        self._is_broken = False
        self._is_complete = False
        self._probed_s = 0.0
        self._listeners: list[Callable[[View], None]] = []
        self.participants: tuple[int, ...] = ()  # whose values the last committed round combines
        self._told = self.view = View(0, tuple(range(identity.num_processes)))
        self._limit_s, self._setting = limits.stuck_s, _STUCK_SETTING
        try:
            self.view = self._told = self._changes.first_view(self.view.members)
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
        while True:
            self.begin_round(name)
            self.operate(lambda connections: results.append(body(connections)))
            is_committed = self.commit()
            self.tell()
            if is_committed:
                return results[-1]

    def begin_round(self, name: str) -> None:
        """Begins a round, of the same name on all members."""
        assert self._connections is not None
        self._is_broken = self._is_complete = False
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
        self._is_complete = not self._is_broken
        before, members = self._num_rounds, self.view.members
        if self.operate(PeerConnections.barrier, follows_work=False):
            self._num_rounds += 1
        else:
            self._change()
        if self._num_rounds > before:
            self.participants = members
        return self._num_rounds > before

    def _change(self) -> None:
        begun_s = time.monotonic()
        lost_from = self.view.members
        while True:
            self._inbox.check_open()
            if self._connections is not None:
                self._connections.close()
            report = Report(
                self._first.process_id, self.view.number, self._num_rounds, self._is_complete
            )
            self.view = self._changes.next_view(self.view, report)
            self._num_rounds = self.view.num_rounds
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
                view.number, view.members, own, sockets, self._check_view, self._times
            )
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
