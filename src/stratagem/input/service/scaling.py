"""Number of input workers that trainers need, from their waits and the rates of the workers.

No sockets and no clock here: times are arguments.

Source: TF 2.21 data/service/auto_scaler.cc: sum of the rates of consumption, by the mean rate of a
worker.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

# Part of its time that a trainer may wait without more workers.
_WAIT_SHARE = 0.05
# Part of its capacity that the service keeps free when it shrinks.
_SPARE_SHARE = 0.1
# Seconds with too many workers before one of them ends.
_QUIET_S = 60.0


@dataclasses.dataclass(frozen=True)
class TrainerWait:
    """Batches that a trainer took in a time, and its seconds with and without waiting for them."""

    num_batches: int
    busy_s: float
    wait_s: float

    @property
    def rate(self) -> float:
        """Batches per second that it would take without waiting; infinite if it only waited."""
        if self.busy_s > 0:
            return self.num_batches / self.busy_s
        return math.inf if self.wait_s else 0.0

    @property
    def is_starved(self) -> bool:
        """True if it waits for more than a small part of its time."""
        return self.wait_s > _WAIT_SHARE * (self.busy_s + self.wait_s)


@dataclasses.dataclass(frozen=True)
class Load:
    """Batches per second that each worker can read, and the waits of trainers."""

    rates: Sequence[float]
    waits: Sequence[TrainerWait]


def workers_wanted(
    rates: Sequence[float], waits: Sequence[TrainerWait], current: int, least: int, most: int
) -> int:
    """Returns the number of workers that trainers need: at most one more or less than now.

    Example:
        >>> starved = TrainerWait(num_batches=10, busy_s=1.0, wait_s=9.0)  # 10 in a second
        >>> workers_wanted([2.0], [starved], current=1, least=1, most=8)
        2
    """
    consumed = sum(wait.rate for wait in waits)
    is_starved = any(wait.is_starved for wait in waits)
    mean = sum(rates) / len(rates) if rates else 0.0
    if is_starved and rates and consumed > current * mean:
        wanted = current + 1
    elif not is_starved and consumed <= (1 - _SPARE_SHARE) * (current - 1) * mean:
        wanted = current - 1
    else:
        wanted = current
    return max(least, min(most, wanted))


class Scaler:
    """Decides on the number of workers; fewer only after a quiet time."""

    def __init__(self, least: int, most: int, quiet_s: float = _QUIET_S) -> None:
        self._least = least
        self._most = most
        self._quiet_s = quiet_s
        self._quiet_since_s: float | None = None

    def decide(self, load: Load, current: int, now_s: float) -> int:
        """Returns the number of workers to have now."""
        wanted = workers_wanted(load.rates, load.waits, current, self._least, self._most)
        if wanted >= current:
            self._quiet_since_s = None
            return wanted
        if self._quiet_since_s is None:
            self._quiet_since_s = now_s
        if now_s < self._quiet_since_s + self._quiet_s:
            return current
        self._quiet_since_s = now_s
        return wanted


def load_between(before: Mapping[str, Any], after: Mapping[str, Any]) -> Load:
    """Returns the load between two results of `DispatchServer.describe`.

    Jobs with ShardingPolicy.OFF do not count: each of their workers reads all data.
    """
    earlier = before["workers"]
    rates = [
        num_read / read_s
        for address, worker in after["workers"].items()
        if address in earlier
        and (num_read := worker["num_read"] - earlier[address]["num_read"]) > 0
        and (read_s := worker["read_s"] - earlier[address]["read_s"]) > 0
    ]
    known = _consumers(before)
    waits = [
        TrainerWait(
            consumer["num_batches"] - known[name]["num_batches"],
            max(0.0, consumer["age_s"] - known[name]["age_s"] - wait_s),
            wait_s,
        )
        for name, consumer in _consumers(after).items()
        if name in known
        for wait_s in [consumer["wait_s"] - known[name]["wait_s"]]
    ]
    return Load(rates, waits)


def _consumers(described: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {
        name: consumer
        for job in described["jobs"]
        if job["policy"] != "OFF"
        for name, consumer in job["consumers"].items()
    }
