"""Restart count: decides whether all tasks are started again."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from stratagem.launch.restart.policy import cause_of_failure, have_saved_and_left
from stratagem.launch.tasks.exit_status import ExitStatus

# Tasks that exit on notice this soon have hardly trained. A notice that never ends, such as on a
# machine about to be taken away, would restart them forever.
SHORT_S = 10.0
MAX_SHORT_STARTS = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class RestartCount:
    """Number of restarts after failures and after notices (tasks that saved and exited).

    `short_starts` counts consecutive starts that were short and ended after a notice.
    """

    failures: int = 0
    notices: int = 0
    short_starts: int = 0

    @property
    def count(self) -> int:
        """All restarts, as the tasks see them."""
        return self.failures + self.notices

    def next(
        self,
        statuses: Sequence[ExitStatus],
        *,
        ran_s: float,
        max_restarts: int,
        were_asked: bool = False,
    ) -> RestartCount | None:
        """Returns the count for the next start, or None if the job is over.

        The tasks ran for `ran_s` seconds; `max_restarts` limits restarts after failures;
        `were_asked` means that the launcher had asked the tasks to save and exit.
        """
        if cause_of_failure(statuses) is None:
            is_done = all(status.returncode == 0 for status in statuses if status.trains)
            if is_done or not were_asked:
                return None
            return dataclasses.replace(self, notices=self.notices + 1, short_starts=0)
        left = have_saved_and_left(statuses)
        is_short = left and ran_s < SHORT_S
        short_starts = self.short_starts + 1 if is_short else 0
        if left and short_starts < MAX_SHORT_STARTS:
            return dataclasses.replace(self, notices=self.notices + 1, short_starts=short_starts)
        if self.failures >= max_restarts:
            return None
        return dataclasses.replace(self, failures=self.failures + 1, short_starts=short_starts)
