"""Changes of an elastic group's members, each counted once for the run."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from stratagem.observe.run_events.reader import ProcessEvents
from stratagem.observe.run_events.records import MembersEvent, StartEvent, StepEvent


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemberChange:
    """The beginning of an elastic group, or a change of its members, as all of them report it.

    Args:
        at_s: time when training stopped for it, or of the first report if that is unknown.
        lost: lost tasks, such as "worker 1".
        joined: tasks that joined.
        num_members: number of members after it.
        num_expected: number of members of a full group.
        change_s: longest time until the members were connected again.
        pause_s: seconds for which training stood still; None if unknown.
        resumed_s: end of the first step after it.

    Example:
        >>> change = sg.goodput.MemberChange(
        ...     at_s=20.0, lost=("worker 1",), joined=(), num_members=2, num_expected=3,
        ...     change_s=0.1, pause_s=0.4, resumed_s=20.5)
        >>> change.cause
        'members lost'

    Source: specific to Stratagem.
    """

    at_s: float
    lost: tuple[str, ...]
    joined: tuple[str, ...]
    num_members: int
    num_expected: int
    change_s: float
    pause_s: float | None
    resumed_s: float

    @property
    def cause(self) -> str | None:
        """The cause of its pause, one of `CAUSES`; None at the beginning of a group."""
        if self.pause_s is None and not (self.lost or self.joined):
            return None
        return "members joined" if self.joined and not self.lost else "members lost"


@dataclasses.dataclass
class _Reports:
    """Events about one view, by the process that wrote them."""

    first_s: float
    by_process: dict[StartEvent, tuple[float, MembersEvent]]


def member_changes(processes: Iterable[ProcessEvents]) -> tuple[MemberChange, ...]:
    """Returns the changes in order; `processes` are those of a run that train."""
    found = [
        (process.at_s(event), process, event)
        for process in processes
        for event in process.events
        if isinstance(event, MembersEvent)
    ]
    groups: list[_Reports] = []
    latest: dict[int, _Reports] = {}  # by view
    for at_s, process, event in sorted(found, key=lambda one: one[0]):
        group = latest.get(event.view)
        # A view of the same number belongs to a later group if its members started after it.
        is_later = group is None or (
            process.at_s(process.start) > group.first_s or process.start in group.by_process
        )
        if group is None or is_later:
            group = latest[event.view] = _Reports(at_s, {})
            groups.append(group)
        group.by_process[process.start] = at_s, event
    return tuple(sorted(map(_merged, groups), key=lambda change: change.at_s))


def _merged(group: _Reports) -> MemberChange:
    """Returns the change that takes longest; one that joins reports neither losses nor a pause."""
    reports = group.by_process.values()
    resumed_s, event = max(reports, key=lambda one: (_length_s(one[1]), _num_named(one[1]), one[0]))
    return MemberChange(
        at_s=resumed_s - _length_s(event),
        lost=tuple(event.lost),
        joined=tuple(event.joined),
        num_members=event.num_members,
        num_expected=event.num_expected,
        change_s=max(one.change_s for _, one in reports),
        pause_s=event.pause_s,
        resumed_s=resumed_s,
    )


def _length_s(event: MembersEvent) -> float:
    """Returns the time of the pause and of the step after it; 0 if unknown."""
    return 0.0 if event.pause_s is None else event.pause_s + (event.step_s or 0.0)


def _num_named(event: MembersEvent) -> int:
    return len(event.lost) + len(event.joined)


def lost_processes(
    processes: Sequence[ProcessEvents], changes: Iterable[MemberChange]
) -> frozenset[StartEvent]:
    """Returns the starts of the processes without which the others have continued.

    A lost task is the latest process of it that made no step after the loss: one that is started
    again may have joined at once.
    """
    last_step_s = {
        process.start: max(
            (process.at_s(event) for event in process.events if isinstance(event, StepEvent)),
            default=0.0,
        )
        for process in processes
    }
    lost: set[StartEvent] = set()
    for change in changes:
        for task in change.lost:
            found = [
                process
                for process in processes
                if process.task == task
                and process.start not in lost
                and process.at_s(process.start) <= change.resumed_s
                and last_step_s[process.start] < change.resumed_s
            ]
            if found:
                lost.add(max(found, key=lambda one: one.at_s(one.start)).start)
    return frozenset(lost)
