"""Configuration of preemption: what counts as notice, and how to save and exit."""

from __future__ import annotations

import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from stratagem import exit_codes
from stratagem.cluster.accelerators import local_gpus
from stratagem.cluster.preemption.environments import (
    name_of_environment,
    pod_time_left,
    slurm_time_left,
)
from stratagem.cluster.preemption.google_cloud import GoogleCloudSource
from stratagem.cluster.preemption.notices import AnySource, Notice, NoticeSource
from stratagem.cluster.preemption.polling import PolledSource
from stratagem.cluster.preemption.signals import SignalSource
from stratagem.messages import explain

EXIT_CODE = exit_codes.RESUMABLE
GOOGLE_CLOUD_EXIT_CODE = exit_codes.TERMINATED
# Google Cloud's notice period before it stops a VM with GPUs for maintenance.
_GOOGLE_CLOUD_GPU_GRACE_S = 3600.0
# A VM that shuts down sends SIGTERM to its processes and stops soon after.
_GOOGLE_CLOUD_SIGTERM_GRACE_S = 30.0


@dataclasses.dataclass(frozen=True)
class TerminationConfig:
    """Defines what counts as a preemption notice, and how to save and exit after one.

    `for_environment` fills in missing values. Without a known environment, SIGTERM is the notice;
    training finishes the step, saves, and exits with code 42.

    Args:
        termination_watcher_fn: polled in a thread; True means notice. Replaces SIGTERM, which then
            ends the program as usual, unless `sources` includes it.
        exit_fn: called without arguments after the last save.
        grace_period: seconds between notice and end. If above 0, the state is saved at once,
            training continues, and the state is saved again before the end. 0 saves once and exits.
        save_fn: called instead of the checkpoint's own `save`.
        sources: notice sources, in addition to the function.
        poll_interval_s: seconds between two calls of `termination_watcher_fn`.

    Raises:
        TypeError: a function is not callable, or a time is not a number.
        ValueError: a negative grace period, or a poll interval that is not above 0.

    Example:
        >>> config = sg.TerminationConfig(grace_period=60).for_environment()
        >>> config.grace_period, config.exit_fn.args
        (60, (42,))

    Source: TF 2.21 failure_handling.py, TerminationConfig.
    """

    termination_watcher_fn: Callable[[], bool] | None = None
    exit_fn: Callable[[], object] | None = None
    grace_period: float | None = None
    save_fn: Callable[..., Any] | None = None
    _: dataclasses.KW_ONLY
    sources: Sequence[NoticeSource] | None = None
    poll_interval_s: float = 1.0

    def __post_init__(self) -> None:
        for name in ("termination_watcher_fn", "exit_fn", "save_fn"):
            _check_function(name, getattr(self, name))
        for name in ("grace_period", "poll_interval_s"):
            _check_time(name, getattr(self, name), above_zero=name == "poll_interval_s")

    @classmethod
    def kubernetes(cls, *, grace_s: float | None = None) -> TerminationConfig:
        """Returns the configuration for a Kubernetes pod: SIGTERM, exit code 42.

        Args:
            grace_s: the pod's `terminationGracePeriodSeconds`; None for `STRATAGEM_POD_GRACE_S`,
                which defaults to Kubernetes's 30.

        Returns:
            The configuration.

        Raises:
            ValueError: the grace period is not above 0.
        """
        source = SignalSource(time_left_s=pod_time_left(grace_s))
        return cls(exit_fn=_exit_with(EXIT_CODE), grace_period=0.0, sources=(source,))

    @classmethod
    def slurm(cls, signals: Sequence[str | int] = ("SIGTERM",)) -> TerminationConfig:
        """Returns the configuration for a Slurm job: signals, exit code 42.

        Args:
            signals: sent by Slurm, such as `["SIGTERM", "SIGUSR1"]` with `--signal=USR1@120`. The
                template of `stratagem slurm render` requests SIGTERM.

        Returns:
            The configuration.

        Raises:
            ValueError: an unknown signal, or `SLURM_JOB_END_TIME` is not a time.
        """
        source = SignalSource(signals, time_left_s=slurm_time_left())
        return cls(exit_fn=_exit_with(EXIT_CODE), grace_period=0.0, sources=(source,))

    @classmethod
    def google_cloud(cls, grace_period: float | None = None) -> TerminationConfig:
        """Returns the configuration for a Google Cloud VM: its metadata server, exit code 143.

        SIGTERM, which a VM sends as it shuts down, counts as notice, too: a save may be in
        progress.

        Args:
            grace_period: seconds; None for 3600 if the VM has GPUs, else 0.

        Returns:
            The configuration.

        Raises:
            RuntimeError: the GPUs cannot be counted.
        """
        if grace_period is None:
            grace_period = _GOOGLE_CLOUD_GPU_GRACE_S if local_gpus() else 0.0
        terminated = SignalSource(time_left_s=lambda: _GOOGLE_CLOUD_SIGTERM_GRACE_S)
        return cls(
            exit_fn=_exit_with(GOOGLE_CLOUD_EXIT_CODE),
            grace_period=grace_period,
            sources=(GoogleCloudSource(), terminated),
        )

    def for_environment(self) -> TerminationConfig:
        """Returns a copy with missing values filled in for the environment of this process.

        If you pass `termination_watcher_fn` or `sources`, no other source is added.

        Returns:
            A configuration with an `exit_fn`, a `grace_period`, and at least one source.

        Raises:
            RuntimeError: as in `google_cloud`.
            ValueError: an environment variable is not a time.

        Source: TF 2.21 failure_handling.py, _complete_config_for_environment.
        """
        presets = {
            "Kubernetes": TerminationConfig.kubernetes,
            "Slurm": TerminationConfig.slurm,
            "Google Cloud": functools.partial(TerminationConfig.google_cloud, self.grace_period),
            None: _default,
        }
        preset = presets[name_of_environment()]()
        has_source = self.termination_watcher_fn is not None or self.sources is not None
        grace_period = preset.grace_period if self.grace_period is None else self.grace_period
        return dataclasses.replace(
            self,
            exit_fn=self.exit_fn or preset.exit_fn,
            grace_period=grace_period,
            sources=self.sources if has_source else preset.sources,
        )

    def source(self) -> NoticeSource:
        """Returns a source that combines all notice sources; the caller starts and stops it.

        Returns:
            The source, not started.

        Raises:
            ValueError: an empty list of sources.
        """
        sources = list(self.sources or ())
        if self.termination_watcher_fn is not None:
            polled = PolledSource(self.termination_watcher_fn, interval_s=self.poll_interval_s)
            sources.append(polled)
        if not sources and self.sources is None:
            sources.append(SignalSource())
        return AnySource(sources)

    def leave_at_s(self, notices: Iterable[Notice]) -> float:
        """Returns the time until which training may continue.

        Args:
            notices: notices received so far.

        Returns:
            Earliest end of a grace period, on the clock of `time.monotonic()`. Each grace period is
            this configuration's, or less if the notice says so. The last save must finish before
            then.
        """
        grace_s = self.grace_period or 0.0
        ends = (
            notice.heard_at_s + min(grace_s, grace_s if notice.grace_s is None else notice.grace_s)
            for notice in notices
        )
        return min(ends, default=time.monotonic() + grace_s)

    def exit(self) -> None:
        """Exits the program: calls `exit_fn`, or exits with code 42 without one."""
        (self.exit_fn or _exit_with(EXIT_CODE))()


def _default() -> TerminationConfig:
    return TerminationConfig(
        exit_fn=_exit_with(EXIT_CODE), grace_period=0.0, sources=(SignalSource(),)
    )


def _exit_with(code: int) -> Callable[[], object]:
    return functools.partial(sys.exit, code)


def _check_function(name: str, function: object) -> None:
    if function is not None and not callable(function):
        raise TypeError(
            explain(
                f"{name}={function!r} is not callable.",
                expected="a function, or None.",
                fix=f"pass a function, such as {name}=lambda: ...",
            )
        )


def _check_time(name: str, time_s: object, *, above_zero: bool) -> None:
    if time_s is None and not above_zero:
        return
    if isinstance(time_s, bool) or not isinstance(time_s, int | float):
        raise TypeError(
            explain(
                f"{name}={time_s!r} is of type {type(time_s).__name__}.",
                expected="a number of seconds.",
                fix=f"pass {name}=60, for example.",
            )
        )
    is_enough = time_s > 0 if above_zero else time_s >= 0
    if not is_enough or time_s == float("inf"):
        raise ValueError(
            explain(
                f"{name}={time_s!r} is out of range.",
                expected="a number of seconds above 0." if above_zero else "seconds, 0 or more.",
                fix=f"pass {name}=60, for example.",
            )
        )
