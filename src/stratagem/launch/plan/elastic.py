"""With how many workers a launch may go on, as a value, and who says how many can run."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

from stratagem import environment
from stratagem.errors import UnavailableError
from stratagem.messages import explain

__all__ = ["Discovery", "ElasticConfig"]

_ASK_EVERY_S = 1.0
_LOOK_EVERY_S = 0.05


@dataclasses.dataclass(frozen=True)
class ElasticConfig:
    """With how many workers training may go on.

    A new number is a new start of all tasks, which go on from what they have saved; the global
    batch stays as it is.

    Args:
        min_workers: with as many at least.
        max_workers: with as many when all are there; None for the `workers` of the launch.
        discover: asked how many workers can run, before each start and once a second while some
            are missing; it should not block. None where nothing tells: the launcher then tries.

    Raises:
        TypeError: a number that is none, a function that cannot be called.
        ValueError: fewer than one worker, or a most below the least.

    Example:
        >>> sg.ElasticConfig(2, 4)
        ElasticConfig(min_workers=2, max_workers=4, discover=None)
    """

    min_workers: int
    max_workers: int | None = None
    discover: Callable[[], int] | None = None

    def __post_init__(self) -> None:
        most = self.min_workers if self.max_workers is None else self.max_workers
        for name, value in (("min_workers", self.min_workers), ("max_workers", most)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(
                    explain(
                        f"{name}={value!r} is no number of workers.",
                        expected="a whole number.",
                        fix=f"correct {name}.",
                    )
                )
        if not 1 <= self.min_workers <= most:
            raise ValueError(
                explain(
                    f"min_workers={self.min_workers} and max_workers={self.max_workers} are no "
                    "range.",
                    expected="1 <= min_workers <= max_workers.",
                    fix="correct them.",
                )
            )
        if self.discover is not None and not callable(self.discover):
            raise TypeError(
                explain(
                    f"discover={self.discover!r} cannot be called.",
                    expected="a function that returns how many workers can run, or None.",
                    fix="pass discover=lambda: 4, for example.",
                )
            )


class Discovery:
    """Asks how many workers can run, not more often than once a second.

    Args:
        config: with the function to ask.
        full_workers: how many there are to be.
    """

    def __init__(self, config: ElasticConfig, full_workers: int) -> None:
        self._config = config
        self._full_workers = full_workers
        self._asked_at_s = -_ASK_EVERY_S
        self._num_workers = 0

    def num_workers(self) -> int | None:
        """Returns how many can run, of those that there are to be; None if nobody knows."""
        discover = self._config.discover
        if discover is None:
            return None
        now_s = time.monotonic()
        if now_s - self._asked_at_s >= _ASK_EVERY_S:
            self._asked_at_s = now_s
            self._num_workers = min(self._full_workers, discover())
        return self._num_workers

    def wait(self, wanted: int, is_over: Callable[[], bool]) -> int:
        """Waits until enough workers can run.

        Args:
            wanted: how many to start where nobody knows.
            is_over: whether waiting has become useless.

        Returns:
            How many to start; 0 where it is over.

        Raises:
            UnavailableError: there were too few for longer than the limit.
        """
        least, begun_s = self._config.min_workers, time.monotonic()
        limit_s = environment.read("join_timeout_s")
        while (found := self.num_workers()) is not None and found < least:
            if is_over():
                return 0
            if time.monotonic() - begun_s > limit_s:
                missing = ", ".join(f"worker {index}" for index in range(max(0, found), least))
                raise UnavailableError(
                    explain(
                        f"{found} workers can run, and {least} are the least: {missing} did not "
                        f"come back within {limit_s:g} s.",
                        expected=f"min_workers={least} within STRATAGEM_JOIN_TIMEOUT_S.",
                        fix="see why they cannot run, lower min_workers, or raise the limit.",
                    )
                )
            time.sleep(_LOOK_EVERY_S)
        return wanted if found is None else found
