"""`CoordinatorOptions`: time and failure limits of a parameter-server cluster."""

from __future__ import annotations

import dataclasses
import math
import types

from stratagem.messages import explain


@dataclasses.dataclass(frozen=True, kw_only=True)
class CoordinatorOptions:
    """Limits of a parameter-server cluster, for `ParameterServerStrategy(options=)`.

    Also available as `sg.coordinator.options`.

    Args:
        start_delay_s: stagger between workers: worker k takes its first function k times this many
            seconds after the coordinator was created, so that the first updates come from few
            workers.
        recovery_timeout_s: seconds that a server or worker may be silent, for example during a
            restart, before callers get an error; None for `STRATAGEM_PEER_TIMEOUT_S`.
        max_transient_failures: number of consecutive functions that may fail because their workers
            cannot reach a server. They are retried; one more raises `PSUnavailableError`.
        journal_interval_s: seconds between journal entries of a server. If the server dies, changes
            since the last entry are lost.
        durable_updates: True makes servers answer each update only once it is in the journal, on
            disk: then no answered update is lost with a server. Each update waits for the disk.

    Raises:
        ValueError: a negative or non-numeric value, or a time limit of 0 s.

    Example:
        >>> sg.coordinator.options(recovery_timeout_s=120).recovery_timeout_s
        120

    Source: TF 2.21 cluster_coordinator.py, TF_COORDINATOR_SCHEDULE_START_DELAY and
    TF_COORDINATOR_IGNORE_TRANSIENT_PS_FAILURES.
    """

    start_delay_s: float = 0.0
    recovery_timeout_s: float | None = None
    max_transient_failures: int = 0
    journal_interval_s: float = 1.0
    durable_updates: bool = False

    def __post_init__(self) -> None:
        _check("start_delay_s", self.start_delay_s, may_be_zero=True)
        if self.recovery_timeout_s is not None:
            _check("recovery_timeout_s", self.recovery_timeout_s)
        _check("max_transient_failures", self.max_transient_failures, may_be_zero=True, kind=int)
        _check("journal_interval_s", self.journal_interval_s)
        if not isinstance(self.durable_updates, bool):
            raise ValueError(
                explain(
                    f"sg.coordinator.options received durable_updates={self.durable_updates!r}.",
                    expected="True or False.",
                    fix="pass a bool, or omit durable_updates for the default.",
                )
            )


def _check(
    name: str,
    value: float,
    *,
    may_be_zero: bool = False,
    kind: type[int] | types.UnionType = int | float,
) -> None:
    is_number = isinstance(value, kind) and not isinstance(value, bool)
    if is_number and math.isfinite(value) and (value > 0 or (may_be_zero and value == 0)):
        return
    least = "0 or more" if may_be_zero else "more than 0"
    raise ValueError(
        explain(
            f"sg.coordinator.options received {name}={value!r}.",
            expected=f"{'an integer' if kind is int else 'a number of seconds'}, {least}.",
            fix=f"pass a valid number, or omit {name} for the default.",
        )
    )


def checked_options(options: object, *, independent: bool) -> CoordinatorOptions:
    """Returns the user's options, or the defaults for None.

    `independent` workers schedule no functions, so limits on these raise a ValueError.
    """
    options = CoordinatorOptions() if options is None else options
    if not isinstance(options, CoordinatorOptions):
        raise TypeError(
            explain(
                f"options={options!r} is of type {type(options).__name__}.",
                expected="sg.coordinator.options(...), or None.",
                fix="pass sg.coordinator.options(...), or omit options.",
            )
        )
    if independent and (options.start_delay_s or options.max_transient_failures):
        raise ValueError(
            explain(
                f"A strategy that schedules no functions received {options}.",
                expected="no limits on scheduled functions.",
                fix="omit start_delay_s and max_transient_failures.",
            )
        )
    return options
