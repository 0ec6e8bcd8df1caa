"""Changes of the view: the lowest member left collects reports and sends the next view."""

from __future__ import annotations

import dataclasses
import logging
import select
import socket
import time

from stratagem.elastic.reaching import Inbox, Peers, receive_message, send_message
from stratagem.elastic.views import Report, View, next_view
from stratagem.errors import DeadlineExceededError, UnavailableError
from stratagem.messages import explain

__all__ = ["ViewChanges"]

_logger = logging.getLogger(__name__)

_POLL_S = 0.02
# Each probe is a handshake in the thread of another process's gate.
_PROBE_EVERY_S = 0.2


class ViewChanges:
    """Finds the next view together with the other members.

    `start_s` is the time that members have to start, `stuck_s` that they have to notice a broken
    view.
    """

    def __init__(
        self, peers: Peers, inbox: Inbox, *, peer_s: float, start_s: float, stuck_s: float
    ) -> None:
        self._peers, self._inbox = peers, inbox
        self._peer_s, self._start_s, self._stuck_s = peer_s, start_s, stuck_s

    def next_view(self, view: View, report: Report) -> View:
        """Returns the view after a broken one, the same on all members that are left.

        Raises UnavailableError if most members do not answer, without having ended;
        DeadlineExceededError if one answers, but does not report in time; RuntimeError if the
        reports contradict each other.
        """
        for candidate in view.members:
            if candidate == self._peers.own:
                return self._collect(view, report)
            found = self._ask(candidate, report)
            if found is not None:
                return found
        raise AssertionError("a member is not in its own view")

    def first_view(self, members: tuple[int, ...], num_backups: int = 0) -> View:
        """Returns the first view once all members have started; raises DeadlineExceededError."""
        own = self._peers.own
        view = View(0, members)
        report = Report(own, 0, 0, is_complete=False, num_backups=num_backups)
        if own == members[0]:
            return self._collect(view, report, starts=True)
        deadline = time.monotonic() + self._start_s
        while time.monotonic() < deadline:
            found = self._ask(members[0], report)
            if found is not None:
                return found
            time.sleep(_PROBE_EVERY_S)
        raise self._not_started([members[0]])

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
                while not _is_readable(connection, _PROBE_EVERY_S):
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
        behind = tuple((member, number) for member, number in answer["behind"])
        return View(answer["number"], tuple(answer["members"]), answer["num_rounds"], behind)

    def _collect(self, view: View, own_report: Report, *, starts: bool = False) -> View:
        reports = {own_report.member: own_report}
        connections: dict[int, socket.socket] = {}
        lost: set[int] = set()
        begun_s = probed_s = time.monotonic()
        try:
            while missing := set(view.members) - reports.keys() - lost:
                self._inbox.check_open()
                for member in missing:
                    self._take_report(member, reports, connections)
                now_s = time.monotonic()
                is_first = probed_s == begun_s
                if not starts and (is_first or now_s - probed_s > _PROBE_EVERY_S):
                    lost |= {one for one in missing - reports.keys() if self._peers.is_lost(one)}
                    probed_s = time.monotonic()
                self._check_time(sorted(missing), now_s - begun_s, starts=starts)
                with self._inbox.changed:
                    if not self._inbox.has_report():
                        self._inbox.changed.wait(_POLL_S)
            return self._decide(view, reports, connections, lost)
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
            connections[member] = connection

    def _decide(
        self,
        view: View,
        reports: dict[int, Report],
        connections: dict[int, socket.socket],
        lost: set[int],
    ) -> View:
        """Sends the next view, or the error that ends the group, to all that report."""
        try:
            self._check_majority(view, lost)
            found = next_view(list(reports.values()))
        except (UnavailableError, RuntimeError) as error:
            for connection in connections.values():
                _send(connection, {"error": str(error)}, self._peer_s)
            raise
        for connection in connections.values():
            _send(connection, dataclasses.asdict(found), self._peer_s)
        return found

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


def _is_readable(connection: socket.socket, limit_s: float) -> bool:
    return bool(select.select([connection], [], [], limit_s)[0])
