"""`RowCache`: which rows of tables a worker keeps, and for how long."""

from __future__ import annotations

import dataclasses

from stratagem.errors import explain


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowCache:
    """Cache of table rows in each worker, for `ParameterServerStrategy(row_cache=)`.

    Training steps take rows from the cache that this worker read a few steps ago. A gradient then
    counts as computed from the oldest of them, also for the strategy's `max_staleness`. Evaluation,
    prediction and reads of a variable always ask the servers.

    A worker drops its cached rows when a server restarts, when a table is assigned by this worker
    or by the coordinator, and when its gradients were discarded as stale.

    Args:
        max_rows: maximum number of cached rows of each table. A row takes its own size and up to
            56 bytes. New rows replace those that were read first.
        max_age_steps: maximum age of a cached row, in steps of this worker since the step that read
            it. 0 reads all rows from the servers, as without a cache.
        reads_own_updates: True reads a row again after this worker has sent a gradient of it. False
            also keeps such rows up to their maximum age, so that the worker's own updates become
            visible to it as late as those of other workers.

    Raises:
        ValueError: a value of a wrong type, no row, or a negative age.

    Example:
        >>> cache = sg.coordinator.RowCache(max_rows=100_000, max_age_steps=10)
        >>> cache.reads_own_updates
        True

    Source: Miao et al., HET: Scaling out Huge Embedding Model Training via Cache-enabled
    Distributed Framework (VLDB 2022), for bounded staleness; Lian et al., Persia (KDD 2022), for
    delayed own updates.
    """

    max_rows: int
    max_age_steps: int
    reads_own_updates: bool = True

    def __post_init__(self) -> None:
        _check("max_rows", self.max_rows, 1)
        _check("max_age_steps", self.max_age_steps, 0)
        if not isinstance(self.reads_own_updates, bool):
            raise ValueError(
                explain(
                    f"RowCache received reads_own_updates={self.reads_own_updates!r}.",
                    expected="True or False.",
                    fix="pass a bool, or omit reads_own_updates for True.",
                )
            )


def _check(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(
            explain(
                f"RowCache received {name}={value!r}.",
                expected=f"an integer, {least} or more.",
                fix="omit row_cache to use no cache.",
            )
        )


def checked_row_cache(row_cache: object, *, synchronous: bool) -> RowCache | None:
    """Returns the user's cache, or None.

    Raises:
        TypeError: it is no `RowCache`.
        ValueError: updates are synchronous.
    """
    if row_cache is None:
        return None
    if not isinstance(row_cache, RowCache):
        raise TypeError(
            explain(
                f"row_cache={row_cache!r} is of type {type(row_cache).__name__}.",
                expected="sg.coordinator.RowCache(...), or None.",
                fix="pass sg.coordinator.RowCache(max_rows=..., max_age_steps=...).",
            )
        )
    if synchronous:
        raise ValueError(
            explain(
                f"A strategy with synchronous=True received row_cache={row_cache!r}.",
                expected="no cache: synchronous updates discard gradients of earlier values.",
                fix="omit row_cache, or use asynchronous updates.",
            )
        )
    return row_cache
