"""Joining of a group that runs, as seen from the process that joins."""

from __future__ import annotations

import dataclasses
import select
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

from stratagem.errors import UnavailableError
from stratagem.group.elastic.inbox import Inbox, Stage
from stratagem.group.elastic.member_messages import receive_message
from stratagem.group.elastic.reaching import EndedError, Peers
from stratagem.group.elastic.views import View
from stratagem.messages import explain

_LOOK_EVERY_S = 0.5
_RETRY_S = 0.1


@dataclasses.dataclass(frozen=True)
class RunningGroup:
    """Description of a group by its members.

    `place` is where processes can join now, or None. `num_calls` counts the calls of `fit` that
    have begun. A group with backup workers admits no process.
    """

    view: int
    members: tuple[int, ...]
    place: str | None
    num_calls: int
    num_backups: int = 0

    @classmethod
    def of_message(cls, message: Mapping[str, Any]) -> RunningGroup:
        """Returns it from the answer to a probe."""
        members = tuple(message["members"])
        place, num_calls = message["place"], message["num_calls"]
        return cls(message["view"], members, place, num_calls, message.get("num_backups", 0))

    def with_candidate(self, own: int, most: int) -> View:
        """Returns the view that can be expected with another process: of at most `most` members."""
        others = [one for one in self.members if one != own][: most - 1]
        return View(self.view, tuple(sorted([*others, own])))


class Candidacy:
    """Waits to become a member of a group that runs."""

    def __init__(self, peers: Peers, inbox: Inbox, *, peer_s: float) -> None:
        self._peers, self._inbox, self._peer_s = peers, inbox, peer_s

    def look(self) -> RunningGroup:
        """Returns the group as its members see it; raises UnavailableError if all have ended."""
        silent_since = time.monotonic()
        while True:
            answers, num_silent = self._probe_all()
            if answers:
                return max(answers, key=lambda one: one.view)
            self._inbox.check_open()
            if not num_silent or time.monotonic() - silent_since > self._peer_s:
                raise self._all_ended()
            time.sleep(_RETRY_S)

    def _probe_all(self) -> tuple[list[RunningGroup], int]:
        """Returns the answers of members, and the number of processes that give none."""
        answers: list[RunningGroup] = []
        num_silent = 0
        for other in self._peers.others:
            try:
                answer = self._peers.probe(other)
            except EndedError:
                continue
            except OSError:
                num_silent += 1
                continue
            if answer.get("stage") == Stage.TRAINS:
                answers.append(RunningGroup.of_message(answer))
        return answers, num_silent

    def wait(self, place: str, look: Callable[[RunningGroup], bool]) -> View | None:
        """Waits at a place of the program until the members admit this process.

        `look` is called with the group from time to time. If it returns True, the wait is over,
        and this returns None. Raises UnavailableError once all members have ended.
        """
        while True:
            group = self.look()
            if look(group):
                return None
            try:
                connection = self._peers.dial_ready(group.members[0], place)
            except OSError:
                time.sleep(_RETRY_S)
                continue
            with connection:
                found = self._await_view(connection, group, look)
            if found is not None:
                return found

    def _await_view(
        self, connection: socket.socket, group: RunningGroup, look: Callable[[RunningGroup], bool]
    ) -> View | None:
        """Returns the next view with this process, or None if another member leads the group."""
        while not select.select([connection], [], [], _LOOK_EVERY_S)[0]:
            now = self.look()
            if now.members[0] != group.members[0]:
                return None
            if now != group and look(now):
                return None
            group = now
        try:
            return View.of_message(receive_message(connection, self._peer_s))
        except OSError:
            time.sleep(_RETRY_S)  # the member that led the group has ended
            return None

    def _all_ended(self) -> UnavailableError:
        return UnavailableError(
            explain(
                f"All members ended before {self._peers.labels[self._peers.own]} could join them.",
                expected="a group that still trains when a process joins.",
                fix="nothing, if the others are done. Otherwise read their errors first.",
                code="SG506",
            )
        )
