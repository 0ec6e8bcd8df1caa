"""Growth of resources over a soak: a line through the samples of each role after warming up."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from validation.soak.sampling import Sample

__all__ = ["Growth", "growths"]

RESOURCES = ("memory_bytes", "num_descriptors", "num_threads", "num_files")
# Allocators and caches fill during the first part.
_WARM_SHARE = 0.25
# What a flat series may seem to grow by over the whole soak: noise of allocators, one more thread
# or descriptor at the end than at the beginning.
_TOLERATED = {"memory_bytes": 0.05, "num_descriptors": 0.1, "num_threads": 0.1, "num_files": 0.1}
_TOLERATED_COUNT = {
    "memory_bytes": 16 * 2**20,
    "num_descriptors": 3,
    "num_threads": 3,
    "num_files": 8,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Growth:
    """A resource of a role: its level after warming up, and its rise until the end.

    `level` is the median of the samples after warming up; `rise` that of the last quarter less that
    of the first quarter of them. Both in the unit of the resource.
    """

    role: str
    resource: str
    level: float
    rise: float

    @property
    def is_flat(self) -> bool:
        share = _TOLERATED[self.resource] * self.level
        return self.rise <= max(share, _TOLERATED_COUNT[self.resource])


def growths(samples: Sequence[Sample]) -> list[Growth]:
    """Returns the growth of each resource of each role that was sampled often enough.

    A process that was restarted is compared over its restarts: each counts once, by its maximum, so
    that a young process does not hide the growth of its predecessors. Series of fewer than eight
    values are left out.
    """
    found: list[Growth] = []
    by_role: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        by_role[sample.role].append(sample)
    for role, series in by_role.items():
        for resource in RESOURCES:
            values = _values(series, resource)
            warm = values[int(len(values) * _WARM_SHARE) :]
            if len(warm) < 8 or not any(warm):
                continue
            quarter = len(warm) // 4
            rise = np.median(warm[-quarter:]) - np.median(warm[:quarter])
            level = float(np.median(warm))
            found.append(Growth(role=role, resource=resource, level=level, rise=float(rise)))
    return found


def _values(series: Sequence[Sample], resource: str) -> list[int]:
    by_pid: dict[int, list[int]] = defaultdict(list)
    for sample in series:
        by_pid[sample.pid].append(getattr(sample, resource))
    if len(by_pid) == 1:
        return by_pid.popitem()[1]
    return [max(values) for values in by_pid.values()]
