"""Number of workers in the next start of a job."""

from __future__ import annotations

from collections.abc import Sequence

from stratagem.launch.plan.options import LaunchOptions
from stratagem.launch.restart.policy import failed_by_themselves, have_saved_and_left
from stratagem.launch.tasks.exit_status import ExitStatus


def workers_after(options: LaunchOptions, num_workers: int, statuses: Sequence[ExitStatus]) -> int:
    """Returns the number of workers to start after a start with `num_workers` has ended.

    Workers that failed by themselves are left out, down to `min_workers`. All workers start if the
    tasks saved and exited, or if there is no `min_workers`.
    """
    failed = failed_by_themselves(statuses)
    if options.min_workers is None or not failed or have_saved_and_left(statuses):
        return options.full_workers
    num_lost = sum(status.name.startswith("worker ") for status in failed)
    return min(num_workers, max(options.min_workers, num_workers - num_lost))


def notice_after_s(options: LaunchOptions, num_workers: int) -> float | None:
    """Returns when, in seconds, tasks should save and exit to add workers; None if all run."""
    return options.rejoin_after_s if num_workers < options.full_workers else None
