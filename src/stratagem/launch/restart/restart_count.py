"""How often all tasks are started again: counted here, carried out in `launcher.py`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from stratagem.launch.restart.policy import cause_of_failure, have_saved_and_left
from stratagem.launch.tasks.exit_status import TaskEnd

__all__ = ["MAX_SHORT_STARTS", "Restarts", "SHORT_S"]

# Tasks that leave after notice so soon after their start have hardly come to do anything: a notice
# that never ends, such as a machine's that is to go, would start them again for ever.
SHORT_S = 10.0
MAX_SHORT_STARTS = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restarts:
    """How often the tasks were started again, and why.

    Args:
        failures: times after a failure.
        notices: times because they had saved their state and left.
        short_starts: how many starts in a row were short and ended so.
    """

    failures: int = 0
    notices: int = 0
    short_starts: int = 0

    @property
    def count(self) -> int:
        """All of them: what the tasks are told."""
        return self.failures + self.notices

    def next(
        self,
        ends: Sequence[TaskEnd],
        *,
        ran_s: float,
        max_restarts: int,
        were_asked: bool = False,
    ) -> Restarts | None:
        """Says whether all are to be started again.

        Args:
            ends: how the tasks ended.
            ran_s: how long they ran.
            max_restarts: how often after a failure.
            were_asked: they had been asked to leave, so that more can start.

        Returns:
            The count with the next start; None where that was the last one.
        """
        if cause_of_failure(ends) is None:
            is_done = all(end.returncode == 0 for end in ends if end.trains)
            if is_done or not were_asked:
                return None
            return dataclasses.replace(self, notices=self.notices + 1, short_starts=0)
        left = have_saved_and_left(ends)
        is_short = left and ran_s < SHORT_S
        short_starts = self.short_starts + 1 if is_short else 0
        if left and short_starts < MAX_SHORT_STARTS:
            return dataclasses.replace(self, notices=self.notices + 1, short_starts=short_starts)
        if self.failures >= max_restarts:
            return None
        return dataclasses.replace(self, failures=self.failures + 1, short_starts=short_starts)
