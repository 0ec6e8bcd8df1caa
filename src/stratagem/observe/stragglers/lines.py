"""Lines of steps that say how fast a worker is."""

from __future__ import annotations

from stratagem.observe.run_events.reader import ProcessEvents
from stratagem.observe.run_events.records import (
    FailureEvent,
    MembersEvent,
    RestoredEvent,
    StartEvent,
    StepEvent,
)


class SettledLines:
    """Picks the lines of steps from events as they arrive.

    It leaves out the first line after a start, a restored state, a failure and a change of the
    members, which contains a compilation or a pause.
    """

    def __init__(self) -> None:
        self._settled: set[StartEvent] = set()

    def pick(self, news: ProcessEvents) -> list[tuple[str, float, StepEvent]]:
        """Returns new lines of a process with its task and their time on the run's clock."""
        found: list[tuple[str, float, StepEvent]] = []
        if not news.trains:
            return found
        for event in news.events:
            if isinstance(event, StepEvent):
                if news.start in self._settled:
                    found.append((news.task, news.at_s(event), event))
                self._settled.add(news.start)
            elif isinstance(event, RestoredEvent | FailureEvent | MembersEvent):
                self._settled.discard(news.start)
        return found
