"""What a notice before preemption is, and what is done then."""

from __future__ import annotations

import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from stratagem.accelerators import local_gpus
from stratagem.goodput import current_events
from stratagem.messages import explain
from stratagem.preemption.environments import (
    name_of_environment,
    pod_time_left,
    slurm_time_left,
)
from stratagem.preemption.google_cloud import GoogleCloudSource
from stratagem.preemption.notices import AnySource, Notice, NoticeSource
from stratagem.preemption.polling import PolledSource
from stratagem.preemption.signals import SignalSource

__all__ = ["EXIT_CODE", "GOOGLE_CLOUD_EXIT_CODE", "TerminationConfig"]

# "Saved, and goes on from there": the templates for Kubernetes and Slurm start such a job again.
EXIT_CODE = 42
# What a program ends with that SIGTERM has ended: 128 + 15.
GOOGLE_CLOUD_EXIT_CODE = 143
# Google Cloud gives notice so long before it stops a VM with GPUs for maintenance.
_GOOGLE_CLOUD_GPU_GRACE_S = 3600.0
# A VM that goes down sends SIGTERM to what runs on it, and is gone soon.
_GOOGLE_CLOUD_SIGTERM_GRACE_S = 30.0


@dataclasses.dataclass(frozen=True)
class TerminationConfig:
    """What counts as a notice before preemption, and what is done then.

    What is left out is filled in by `for_environment`. Without a known environment SIGTERM is
    notice; the step is finished, the state saved, and the program exits with code 42.

    Args:
        termination_watcher_fn: asked again and again in a thread; True is notice. It takes the
            place of SIGTERM, which then ends the program as ever, unless `sources` names it too.
        exit_fn: called without arguments after the last save.
        grace_period: with so many seconds between notice and end, the state is saved at once,
            training goes on, and it is saved again before the end. 0 saves once and exits.
        save_fn: called in place of the checkpoint's own `save`.
        sources: what to listen to, beside the function.
        poll_interval_s: the pause between two calls of `termination_watcher_fn`.

    Raises:
        TypeError: a function that cannot be called, a time that is no number.
        ValueError: a negative grace period, or a pause that is not above 0.

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
        """Returns the configuration for a pod: SIGTERM, exit code 42.

        Args:
            grace_s: the pod's `terminationGracePeriodSeconds`; `STRATAGEM_POD_GRACE_S`, or else
                Kubernetes's default of 30, without it.

        Returns:
            The configuration.

        Raises:
            ValueError: as of `pod_time_left`.
        """
        source = SignalSource(time_left_s=pod_time_left(grace_s))
        return cls(exit_fn=_exit_with(EXIT_CODE), grace_period=0.0, sources=(source,))

    @classmethod
    def slurm(cls, signals: Sequence[str | int] = ("SIGTERM",)) -> TerminationConfig:
        """Returns the configuration for a Slurm job: signals, exit code 42.

        Args:
            signals: those that Slurm sends: `["SIGTERM", "SIGUSR1"]` with `--signal=USR1@120`.
                The template of `stratagem slurm render` asks for SIGTERM.

        Returns:
            The configuration.

        Raises:
            ValueError: no such signal; `SLURM_JOB_END_TIME` is no time.
        """
        source = SignalSource(signals, time_left_s=slurm_time_left())
        return cls(exit_fn=_exit_with(EXIT_CODE), grace_period=0.0, sources=(source,))

    @classmethod
    def google_cloud(cls, grace_period: float | None = None) -> TerminationConfig:
        """Returns the configuration for a VM of Google Cloud: its metadata server, exit code 143.

        SIGTERM, which a VM sends as it goes down, is notice too: a save may be under way.

        Args:
            grace_period: 3600 without it where the VM has GPUs, else 0.

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
        """Returns this configuration with what was left out filled in, as fits this process.

        A function or sources of one's own are all that is listened to.

        Returns:
            The configuration, with an `exit_fn`, a `grace_period`, and something to listen to.

        Raises:
            RuntimeError: as of `google_cloud`.
            ValueError: a variable of the environment is no time.

        Source: TF 2.21 failure_handling.py, _complete_config_for_environment.
        """
        presets = {
            "Kubernetes": TerminationConfig.kubernetes,
            "Slurm": TerminationConfig.slurm,
            "Google Cloud": functools.partial(TerminationConfig.google_cloud, self.grace_period),
            None: _default,
        }
        preset = presets[name_of_environment()]()
        listens = self.termination_watcher_fn is not None or self.sources is not None
        grace_period = preset.grace_period if self.grace_period is None else self.grace_period
        return dataclasses.replace(
            self,
            exit_fn=self.exit_fn or preset.exit_fn,
            grace_period=grace_period,
            sources=self.sources if listens else preset.sources,
        )

    def source(self) -> NoticeSource:
        """Returns what hears the notices, to be started and stopped by the caller.

        Returns:
            One source that hears what any of them hears.

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
        """Returns until when training may go on.

        Args:
            notices: those that were heard.

        Returns:
            The earliest end of a grace, by `time.monotonic()`. What is left of it has to do for the
            last save. The grace is this configuration's, or less where a notice says so.
        """
        grace_s = self.grace_period or 0.0
        ends = (
            notice.heard_at_s + min(grace_s, grace_s if notice.grace_s is None else notice.grace_s)
            for notice in notices
        )
        return min(ends, default=time.monotonic() + grace_s)

    def exit(self) -> None:
        """Leaves the program: calls `exit_fn`, or exits with code 42 without one."""
        try:
            (self.exit_fn or _exit_with(EXIT_CODE))()
        except SystemExit as leaving:
            events = current_events()
            # When the program ends nobody can find out any more what it ends with.
            if events is not None and isinstance(leaving.code, int):
                events.end(leaving.code, "left after notice")
            raise


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
                f"{name}={function!r} cannot be called.",
                expected="a function, or None.",
                fix=f"pass {name}=lambda: ..., for example.",
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
                fix="pass 60, for example.",
            )
        )
    is_enough = time_s > 0 if above_zero else time_s >= 0
    if not is_enough or time_s == float("inf"):
        raise ValueError(
            explain(
                f"{name}={time_s!r} is out of range.",
                expected="a number of seconds above 0." if above_zero else "seconds, 0 or more.",
                fix="pass 60, for example.",
            )
        )
