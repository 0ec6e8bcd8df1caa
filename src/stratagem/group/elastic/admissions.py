"""Agreement of the members of a view on when they admit others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from stratagem.group.elastic.changes import SafePoint
from stratagem.group.elastic.inbox import Inbox
from stratagem.group.elastic.peer_connections import PeerConnections
from stratagem.group.elastic.views import View

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

    def __init__(self, inbox: Inbox, own: int, *, most: int, prepares: bool) -> None:
        self._inbox, self._own, self._most, self._prepares = inbox, own, most, prepares
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
        leads = self._own == view.members[0]
        if leads and size <= self._most and self._is_awaited(view):
            flag |= _WANTED
        return flag

    def _is_awaited(self, view: View) -> bool:
        place = None if self.safe is None else self.safe.place
        return self._inbox.has_candidate(place, view.members)

    def note(self, flags: Sequence[int]) -> None:
        """Takes what all members have said in a commit, by rank."""
        is_wanted = bool(flags[0] & _WANTED)
        self.wanted_size = len(flags) + 1 if is_wanted else None
        self.is_change_due = is_wanted and all(flag & _PREPARED for flag in flags)
