"""`ElasticGroup`: a process among those that train together, as seen from itself."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import time
from collections.abc import Callable, Generator
from typing import Any, NoReturn, TypeVar

from stratagem import logs
from stratagem.group.authentication.secret import Credentials
from stratagem.group.current import Identity
from stratagem.group.elastic.changes import GroupRunsError
from stratagem.group.elastic.inbox import Candidacy, RunningGroup, Stage
from stratagem.group.elastic.peer_connections import PeerConnections, PeerLostError
from stratagem.group.elastic.rounds import STUCK_SETTING, ElasticRounds
from stratagem.group.elastic.views import agreement_refused
from stratagem.group.verdict import Activity, GroupLimits
from stratagem.group.wire import decode, encode

_logger = logging.getLogger(__name__)
_Result = TypeVar("_Result")
# Exchanges before training: a process that has not joined yet has only its own values.
_BEFORE_TRAINING = ("the random state", "the initial values of ", "a call of ")


class ElasticGroup(ElasticRounds):
    """The processes that train together and continue without lost ones. Joins on construction.

    `identity.addresses` has the address of each process, at which it listens.

    A round is a number of operations and a commit. If a member is lost before all have the values
    of a round, no member commits it. One thread at a time runs rounds.

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
        super().__init__(identity, limits, credentials, prepares=prepares)
        self._candidacy = Candidacy(self._peers, self._inbox, peer_s=limits.peer_s)
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

    # What code for any group uses; see `process_group.Group`.

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
        `process_group.Group`. Raises as `run_round`.
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
            self._limit_s, self._setting = self.limits.stuck_s, STUCK_SETTING
        members = [member for member in self.view.members if member in received]
        return [decode(json.loads(received[member])) for member in members]

    def listen(self, topic: str, listener: object) -> NoReturn:
        """Refuses agreements on a step, which a lost member would leave open."""
        del listener
        raise agreement_refused(topic)

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
            self.run_round("the state for new members", self._hand_over)
            self.admissions.newcomers = ()
        safe = self.admissions.safe
        if had_newcomers and safe is not None:
            self.admissions.mark(safe.place, self._num_rounds)

    def _hand_over(self, connections: PeerConnections) -> None:
        self.admissions.hand_over(connections, self.view)

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
