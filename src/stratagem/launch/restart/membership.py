"""With how many workers the tasks are started again: decided here, carried out in `launcher.py`."""

from __future__ import annotations

from collections.abc import Sequence

from stratagem.launch.plan.options import LaunchOptions
from stratagem.launch.restart.policy import have_saved_and_left
from stratagem.launch.tasks.exit_status import TaskEnd, lost_a_peer

__all__ = ["notice_after_s", "workers_after"]


def workers_after(options: LaunchOptions, num_workers: int, ends: Sequence[TaskEnd]) -> int:
    """Returns with how many workers the next start is.

    Args:
        options: of the launch.
        num_workers: how many there were in the last start.
        ends: how its tasks ended.

    Returns:
        As many as before without those that failed by themselves, `min_workers` at least. All of
        them after tasks that saved and left, and where there is no such least number.
    """
    lost = [end for end in ends if end.failed and not lost_a_peer(end.lines)]
    if options.min_workers is None or not lost or have_saved_and_left(ends):
        return options.full_workers
    num_lost = sum(end.name.startswith("worker ") for end in lost)
    return min(num_workers, max(options.min_workers, num_workers - num_lost))


def notice_after_s(options: LaunchOptions, num_workers: int) -> float | None:
    """Returns after how long the tasks are asked to save and leave, so that all can start.

    Args:
        options: of the launch.
        num_workers: how many there are.

    Returns:
        Seconds from the start; None where all are there.
    """
    return options.rejoin_after_s if num_workers < options.full_workers else None
