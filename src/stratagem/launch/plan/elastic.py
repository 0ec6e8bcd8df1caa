"""Elastic membership: allowed numbers of workers, and discovery of available workers."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

from stratagem import settings
from stratagem.errors import UnavailableError, explain

_DISCOVER_EVERY_S = 1.0
_POLL_S = 0.05


@dataclasses.dataclass(frozen=True)
class ElasticConfig:
    """Numbers of workers with which training may continue.

    When the number changes, all tasks restart from their last checkpoint. The global batch size
    stays the same.

    Args:
        min_workers: smallest number of workers.
        max_workers: number of workers when all are available; None for the `workers` of the
            launch.
        discover: returns the number of workers that can run. It is called before each start, and
            once a second while workers are missing, so it must not block. None if that is unknown:
            the launcher then tries.

    Raises:
        TypeError: a number is not an int, or `discover` is not callable.
        ValueError: `min_workers` is less than 1 or greater than `max_workers`.

    Example:
        >>> sg.ElasticConfig(2, 4)
        ElasticConfig(min_workers=2, max_workers=4, discover=None)

    Source: specific to Stratagem.
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
                        f"{name}={value!r} is of type {type(value).__name__}.",
                        expected="a whole number.",
                        fix=f"pass {name} as an int.",
                    )
                )
        if not 1 <= self.min_workers <= most:
            raise ValueError(
                explain(
                    f"min_workers={self.min_workers} and max_workers={self.max_workers} are not a "
                    "valid range.",
                    expected="1 <= min_workers <= max_workers.",
                    fix="lower min_workers, or raise max_workers.",
                )
            )
        if self.discover is not None and not callable(self.discover):
            raise TypeError(
                explain(
                    f"discover={self.discover!r} is not callable.",
                    expected="a function that returns the number of workers that can run, or None.",
                    fix="pass discover=lambda: 4, for example.",
                )
            )


class Discovery:
    """Discovers how many workers can run, at most once a second and at most `full_workers`."""

    def __init__(self, config: ElasticConfig, full_workers: int) -> None:
        self._config = config
        self._full_workers = full_workers
        self._discovered_at_s = -_DISCOVER_EVERY_S
        self._num_workers = 0

    def num_workers(self) -> int | None:
        """Returns the number of workers that can run, or None if unknown."""
        discover = self._config.discover
        if discover is None:
            return None
        now_s = time.monotonic()
        if now_s - self._discovered_at_s >= _DISCOVER_EVERY_S:
            self._discovered_at_s = now_s
            self._num_workers = min(self._full_workers, discover())
        return self._num_workers

    def wait(self, wanted: int, is_over: Callable[[], bool]) -> int:
        """Waits until enough workers can run, and returns how many to start; 0 once `is_over()`.

        Returns `wanted` if the number is unknown. Raises UnavailableError if too few can run for
        longer than the limit.
        """
        least, started_s = self._config.min_workers, time.monotonic()
        limit_s = settings.read("join_timeout_s")
        while (found := self.num_workers()) is not None and found < least:
            if is_over():
                return 0
            if time.monotonic() - started_s > limit_s:
                missing = ", ".join(f"worker {index}" for index in range(max(0, found), least))
                raise UnavailableError(
                    explain(
                        f"{found} of at least {least} workers can run; {missing} did not return "
                        f"within {limit_s:g} s.",
                        expected=f"min_workers={least} within STRATAGEM_JOIN_TIMEOUT_S.",
                        fix="check why they cannot run, lower min_workers, or raise the limit.",
                    )
                )
            time.sleep(_POLL_S)
        return wanted if found is None else found
