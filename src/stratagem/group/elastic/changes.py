"""Changes of the view: the lowest member left collects reports and sends the next view.

Also the pauses of training that changes make, as events of the run.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import select
import socket
import statistics
import time
from collections.abc import Callable, Mapping

from stratagem.errors import DeadlineExceededError, UnavailableError, explain
from stratagem.group.elastic.joining import SafePoint
from stratagem.group.elastic.peers import (
    Candidate,
    Inbox,
    Peers,
    Stage,
    receive_message,
    send_message,
)
from stratagem.group.elastic.views import Report, View, next_view, with_newcomers
from stratagem.group.verdict import GroupLimits
from stratagem.observe.events import MembersEvent
from stratagem.observe.process_writer import current_events
from stratagem.observe.writer import EventWriter

_logger = logging.getLogger(__name__)

_POLL_S = 0.02
# Each probe is a handshake in the thread of another process's gate.
_PROBE_EVERY_S = 0.2


class GroupRunsError(Exception):
    """The others train already, so that this process can only join them."""


class ViewChanges:
    """Finds the next view together with the other members.

    Members have `limits.join_s` to start, and `limits.stuck_s` to notice a broken view.
    """

    def __init__(self, peers: Peers, inbox: Inbox, limits: GroupLimits) -> None:
        self._peers, self._inbox = peers, inbox
        self._peer_s, self._start_s, self._stuck_s = limits.peer_s, limits.join_s, limits.stuck_s

    def next_view(self, view: View, report: Report, safe: SafePoint | None = None) -> View:
        """Returns the view after a broken one, the same on all members that are left.

        At a safe point, the lowest member adds processes that wait there. Raises UnavailableError
        if most members do not answer, without having ended; DeadlineExceededError if one answers,
        but does not report in time; RuntimeError if the reports contradict each other.
        """
        for candidate in view.members:
            if candidate == self._peers.own:
                return self._collect(view, report, safe)
            found = self._ask(candidate, report)
            if found is not None:
                return found
        raise AssertionError("a member is not in its own view")

    def first_view(self, members: tuple[int, ...]) -> View:
        """Returns the first view once all members have started.

        Raises DeadlineExceededError, and GroupRunsError if the others have started before.
        """
        own = self._peers.own
        view = View(0, members)
        report = Report(own, 0, 0, is_complete=False, incarnation=self._peers.incarnation)
        if own == members[0]:
            return self._collect(view, report, starts=True)
        deadline = time.monotonic() + self._start_s
        while time.monotonic() < deadline:
            if self._stage_of(members[0]) != Stage.STARTS:
                self._check_others(self._peers.others)
            elif (found := self._ask_first(members[0], report)) is not None:
                return found
            time.sleep(_PROBE_EVERY_S)
        raise self._not_started([members[0]])

    def _stage_of(self, member: int) -> str | None:
        """Returns the stage of a process; None if it does not answer."""
        try:
            return self._peers.probe(member).get("stage")
        except OSError:
            return None

    def _check_others(self, others: list[int]) -> None:
        """Raises GroupRunsError if a process trains."""
        self._inbox.check_open()
        if any(self._stage_of(one) == Stage.TRAINS for one in others):
            raise GroupRunsError

    def _ask_first(self, candidate: int, report: Report) -> View | None:
        """Reports to the first member; returns its answer, or None if it is lost."""
        try:
            return self._ask(candidate, report)
        except UnavailableError:
            self._check_others([candidate])  # it began in this moment, with the process before
            raise

    def _ask(self, candidate: int, report: Report) -> View | None:
        """Reports to a member; returns its answer, or None if it is lost."""
        while True:
            try:
                connection = self._peers.dial_report(candidate)
                break
            except OSError:
                self._inbox.check_open()
                if self._peers.is_lost(candidate):
                    return None
                time.sleep(_PROBE_EVERY_S)
        with connection:
            try:
                send_message(connection, dataclasses.asdict(report), self._peer_s)
                begun_s = time.monotonic()
                while not select.select([connection], [], [], _PROBE_EVERY_S)[0]:
                    self._inbox.check_open()
                    if self._peers.is_lost(candidate):
                        return None
                    if time.monotonic() - begun_s > max(self._stuck_s, self._start_s):
                        raise self._stuck([candidate], time.monotonic() - begun_s)
                answer = receive_message(connection, self._peer_s)
            except (DeadlineExceededError, UnavailableError):
                raise
            except OSError:
                return None
        if "error" in answer:
            raise UnavailableError(answer["error"])
        return View.of_message(answer)

    def _collect(
        self,
        view: View,
        own_report: Report,
        safe: SafePoint | None = None,
        *,
        starts: bool = False,
    ) -> View:
        reports = {own_report.member: own_report}
        connections: dict[int, socket.socket] = {}
        lost: set[int] = set()
        begun_s = probed_s = time.monotonic()
        try:
            while missing := set(view.members) - reports.keys() - lost:
                self._inbox.check_open()
                # While a group starts, a process may be started again after its report.
                for member in view.members if starts else missing:
                    self._take_report(member, reports, connections)
                now_s = time.monotonic()
                is_first = probed_s == begun_s
                if is_first or now_s - probed_s > _PROBE_EVERY_S:
                    absent = sorted(missing - reports.keys())
                    if starts:
                        self._check_others(absent)
                    else:
                        lost |= {one for one in absent if self._peers.is_lost(one)}
                    probed_s = time.monotonic()
                self._check_time(sorted(missing), now_s - begun_s, starts=starts)
                with self._inbox.changed:
                    if not self._inbox.has_report():
                        self._inbox.changed.wait(_POLL_S)
            return self._decide(view, reports, connections, lost, safe)
        finally:
            for connection in connections.values():
                connection.close()

    def _take_report(
        self, member: int, reports: dict[int, Report], connections: dict[int, socket.socket]
    ) -> None:
        connection = self._inbox.take_report(member)
        if connection is None:
            return
        try:
            reports[member] = Report(**receive_message(connection, self._peer_s))
        except (OSError, TypeError):  # it has given up, and will report again
            connection.close()
        else:
            if (before := connections.get(member)) is not None:
                before.close()
            connections[member] = connection

    def _decide(
        self,
        view: View,
        reports: dict[int, Report],
        connections: dict[int, socket.socket],
        lost: set[int],
        safe: SafePoint | None,
    ) -> View:
        """Sends the next view, or the error that ends the group, to all that report."""
        try:
            self._check_majority(view, lost)
            found = next_view(list(reports.values()))
        except (UnavailableError, RuntimeError) as error:
            for connection in connections.values():
                _send(connection, {"error": str(error)}, self._peer_s)
            raise
        candidates = self._candidates(found, safe)
        found = with_newcomers(
            found, {member: one.incarnation for member, one in candidates.items()}
        )
        is_due = (
            not candidates
            and safe is not None
            and self._inbox.has_candidate(safe.place, found.members)
        )
        found = dataclasses.replace(found, is_change_due=is_due)
        waiting = [one.connection for one in candidates.values()]
        # One that gets the view may report at once that it is broken.
        self._inbox.begin_view(found.number, found.expected)
        for connection in (*connections.values(), *waiting):
            _send(connection, dataclasses.asdict(found), self._peer_s)
        for connection in waiting:
            connection.close()
        return found

    def _candidates(self, found: View, safe: SafePoint | None) -> dict[int, Candidate]:
        """Returns the processes to add, if no round was committed since the safe point."""
        if safe is None or found.num_rounds != safe.num_rounds:
            return {}
        return self._inbox.take_candidates(safe.place, found.members)

    def _check_time(self, missing: list[int], waited_s: float, *, starts: bool) -> None:
        if starts and waited_s > self._start_s:
            raise self._not_started(missing)
        if not starts and waited_s > self._stuck_s:
            raise self._stuck(missing, waited_s)

    def _check_majority(self, view: View, lost: set[int]) -> None:
        """Raises UnavailableError if the lost members may continue by themselves."""
        silent = sorted(member for member in lost if self._peers.is_silent(member))
        num_present = len(view.members) - len(lost)
        if silent and 2 * num_present <= len(view.members):
            raise UnavailableError(
                explain(
                    f"{self._named(silent)} did not answer for {self._peer_s:g} s, and only "
                    f"{num_present} of {len(view.members)} members are left.",
                    expected="more than half of the members, unless the others have ended: those "
                    "may be on the other side of a broken network, and continue.",
                    fix="check the network between the hosts, then restart all processes; "
                    "STRATAGEM_PEER_TIMEOUT_S is the limit.",
                    code="SG506",
                )
            )

    def _not_started(self, missing: list[int]) -> DeadlineExceededError:
        return DeadlineExceededError(
            explain(
                f"{self._peers.labels[self._peers.own]} waited {self._start_s:g} s for "
                f"{self._named(missing)}.",
                expected=f"all processes within {self._start_s:g} s (STRATAGEM_JOIN_TIMEOUT_S).",
                fix="check whether it was started and can be reached from this host.",
                code="SG504",
            )
        )

    def _stuck(self, missing: list[int], waited_s: float) -> DeadlineExceededError:
        self._inbox.print_stacks()
        self._peers.ask_for_stacks()
        return DeadlineExceededError(
            explain(
                f"{self._named(missing)} still runs, but has not reached a step or an exchange "
                f"for {waited_s:.0f} s since another member was lost.",
                expected=f"progress within {self._stuck_s:g} s (STRATAGEM_STUCK_TIMEOUT_S).",
                fix="check what the process does; raise the limit if a step takes that long.",
                code="SG508",
            )
        )

    def _named(self, members: list[int]) -> str:
        return ", ".join(self._peers.labels[member] for member in members)


def _send(connection: socket.socket, message: dict[str, object], limit_s: float) -> None:
    try:
        send_message(connection, message, limit_s)
    except OSError:  # the next change notices
        _logger.debug("A member was lost while the view changed.")


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
