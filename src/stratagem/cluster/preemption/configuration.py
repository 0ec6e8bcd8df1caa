"""Configuration of preemption: what counts as notice, and how to save and exit."""

from __future__ import annotations

import dataclasses
import functools
import http.client
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from stratagem import environment, settings
from stratagem import errors as exit_codes
from stratagem.cluster.accelerators import local_gpus
from stratagem.cluster.preemption.notices import AnySource, Notice, NoticeSource, WatchingSource
from stratagem.cluster.preemption.signals import SignalSource
from stratagem.cluster.resolvers.gce import metadata
from stratagem.errors import check_type, explain, invalid

# Notice source that polls a user's function.


class PolledSource(WatchingSource):
    """Polls a function in a thread until it returns True.

    An error in the function ends polling; `notice` and `wait` raise it.

    Args:
        watcher_fn: returns True for a notice, False otherwise. It should not block.
        interval_s: seconds between two calls.

    Raises:
        ValueError: the interval is not above 0.

    Example:
        >>> with sg.preemption.PolledSource(lambda: True) as source:
        ...     source.wait(timeout_s=10).source
        'termination_watcher_fn'

    Source: TF 2.21 failure_handling.py, _poll_termination_signal.
    """

    def __init__(self, watcher_fn: Callable[[], bool], *, interval_s: float = 1.0) -> None:
        super().__init__()
        if not 0 < interval_s < float("inf"):
            raise invalid(
                f"interval_s={interval_s!r} is out of range.",
                expected="a number of seconds above 0.",
                fix="pass interval_s=1.0, for example.",
            )
        self._watcher_fn = watcher_fn
        self._interval_s = interval_s

    def _listen(self) -> None:
        self._begin(self._poll, "poll")

    def _poll(self) -> None:
        while not self._has_notice():
            if self._stopped.wait(self._interval_s):
                return
        self._hear_now("termination_watcher_fn", "The termination_watcher_fn returned True.")

    def _has_notice(self) -> bool:
        answer = self._watcher_fn()
        if answer not in (True, False):
            raise TypeError(
                explain(
                    f"The termination_watcher_fn returned {answer!r}.",
                    expected="True for a notice, False otherwise.",
                    fix="return a comparison, such as text == 'TRUE'.",
                )
            )
        return bool(answer)


# Preemption and maintenance notices from Google Cloud's metadata server.

# The server answers when a value changes, or after this time. This also bounds the delay of a
# change between two requests, and how long a thread runs after `stop`. It must be less than the
# timeout in `metadata`.
_WAIT_S = 5
_PAUSE_S = 1.0
# The server is on the same host, but sometimes does not answer.
_MAX_SILENCE_S = 60.0
_ALTERNATIVE = "a TerminationConfig with sources or with a termination_watcher_fn"
_PRODUCT_NAME = Path("/sys/class/dmi/id/product_name")


@dataclasses.dataclass(frozen=True)
class _Key:
    """A value of the metadata server, its text in case of a notice, and the meaning of that."""

    path: str
    alarm: str
    message: str
    grace_s: float | None


_KEYS = (
    _Key("instance/preempted", "TRUE", "Google Cloud preempts this Spot VM.", 30.0),
    _Key(
        "instance/maintenance-event",
        "TERMINATE_ON_HOST_MAINTENANCE",
        "Google Cloud stops this VM for maintenance of its host.",
        None,
    ),
)


def on_google_cloud() -> bool:
    """Returns True on a Google Cloud VM, by its firmware or GCE_METADATA_HOST or _IP."""
    if environment.lookup("GCE_METADATA_HOST") or environment.lookup("GCE_METADATA_IP"):
        return True
    try:
        return _PRODUCT_NAME.read_text().startswith("Google")
    except OSError:
        return False


class GoogleCloudSource(WatchingSource):
    """Receives preemption and maintenance notices from the metadata server.

    A Spot VM has 30 seconds after its notice. Maintenance leaves an hour for VMs with GPUs and a
    minute for others; the server does not say which. Live migration gives no notice. If the server
    does not answer for a minute, `notice` and `wait` raise an error.

    Example:
        >>> source = sg.preemption.GoogleCloudSource()  # `with source:` asks the metadata server
        >>> source.hear(sg.preemption.Notice(  # the server's answer, once the VM is preempted
        ...     source="metadata", message="This VM is preempted.", heard_at_s=0.0, grace_s=30.0))
        >>> source.notice.grace_s
        30.0

    Source: TF 2.21 failure_handling_util.py, termination_watcher_function_gce; Google Cloud's pages
    "Query metadata server for maintenance event notices" and "Create and use Spot VMs".
    """

    def _listen(self) -> None:
        texts = [metadata(key.path, instead=_ALTERNATIVE) for key in _KEYS]
        for key, text in zip(_KEYS, texts, strict=True):
            if not self._is_alarm(key, text):
                name = key.path.rpartition("/")[2]
                self._begin(functools.partial(self._poll, key), name)

    def _poll(self, key: _Key) -> None:
        path = f"{key.path}?wait_for_change=true&timeout_sec={_WAIT_S}"
        answered_at_s = time.monotonic()
        while not self._stopped.is_set():
            asked_at_s = time.monotonic()
            try:
                text = metadata(path, instead=_ALTERNATIVE)
            except (RuntimeError, http.client.HTTPException):
                if time.monotonic() - answered_at_s > _MAX_SILENCE_S:
                    raise
            else:
                answered_at_s = time.monotonic()
                if self._is_alarm(key, text):
                    return
            # Proxies such as GKE's may answer without waiting for a change.
            self._stopped.wait(max(0.0, asked_at_s + _PAUSE_S - time.monotonic()))

    def _is_alarm(self, key: _Key, text: str) -> bool:
        if text.strip() != key.alarm:
            return False
        self._hear_now(f"metadata {key.path}", key.message, key.grace_s)
        return True


# Detection of Kubernetes, Slurm and Google Cloud, and the time they leave after a notice.


def name_of_environment() -> str | None:
    """Returns the name of the environment that gives notice to this process; None elsewhere.

    A scheduler takes precedence over the cloud that provides its machines.
    """
    if environment.lookup("KUBERNETES_SERVICE_HOST"):
        return "Kubernetes"
    if environment.lookup("SLURM_JOB_ID"):
        return "Slurm"
    return "Google Cloud" if on_google_cloud() else None


def pod_time_left(grace_s: float | None = None) -> Callable[[], float]:
    """Returns a function that gives the seconds that a pod has after SIGTERM.

    A pod cannot read its `terminationGracePeriodSeconds`; None is for `STRATAGEM_POD_GRACE_S`.
    """
    time_left_s = settings.read("pod_grace_s") if grace_s is None else float(grace_s)
    if not 0 < time_left_s < float("inf"):
        raise invalid(
            f"A pod's grace_s={grace_s!r} is out of range.",
            expected="a number of seconds above 0: its terminationGracePeriodSeconds.",
            fix="pass that value, or omit grace_s if you don't know it.",
        )
    return lambda: time_left_s


def slurm_time_left() -> Callable[[], float] | None:
    """Returns a function that gives the seconds until the time limit of a Slurm job.

    A preempted or canceled job has less time, but Slurm does not report how much. None if
    `SLURM_JOB_END_TIME` is not set, as in older versions of Slurm.
    """
    text = environment.lookup("SLURM_JOB_END_TIME")
    if text is None:
        return None
    if not text.isdecimal():
        raise invalid(
            f"SLURM_JOB_END_TIME={text!r} is not a time.",
            expected="whole seconds since 1970, as Slurm sets it.",
            fix="unset the variable.",
        )
    ends_at_s = int(text)
    return lambda: max(0.0, ends_at_s - time.time())


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
            if (function := getattr(self, name)) is not None:
                fix = f"pass a function, such as {name}=lambda: ..."
                check_type(name, function, callable, "a function, or None", fix)
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
        return _saving_once(SignalSource(time_left_s=pod_time_left(grace_s)))

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
        return _saving_once(SignalSource(signals, time_left_s=slurm_time_left()))

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
            None: lambda: _saving_once(SignalSource()),
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


def _saving_once(source: NoticeSource) -> TerminationConfig:
    return TerminationConfig(exit_fn=_exit_with(EXIT_CODE), grace_period=0.0, sources=(source,))


def _exit_with(code: int) -> Callable[[], object]:
    return functools.partial(sys.exit, code)


def _check_time(name: str, time_s: Any, *, above_zero: bool) -> None:
    if time_s is None and not above_zero:
        return
    fix = f"pass {name}=60, for example."
    kind = int if isinstance(time_s, bool) else int | float
    check_type(name, time_s, kind, "a number of seconds", fix)
    number: Any = time_s
    is_enough = number > 0 if above_zero else number >= 0
    if not is_enough or number == float("inf"):
        expected = "a number of seconds above 0." if above_zero else "seconds, 0 or more."
        raise invalid(f"{name}={time_s!r} is out of range.", expected=expected, fix=fix)


# Watcher that distinguishes a preemption from an ordinary failure.


class PreemptionWatcher:
    """Listens for notices to this process, to find out whether a failure is due to preemption.

    Args:
        termination_config: what counts as notice; None for the defaults of the environment.

    Raises:
        RuntimeError: signals cannot be handled here, for example outside the main thread.

    Example:
        >>> import signal
        >>> with sg.PreemptionWatcher() as watcher:
        ...     print(watcher.preemption_message)
        ...     signal.raise_signal(signal.SIGTERM)
        ...     print(watcher.preemption_message)
        None
        SIGTERM was sent to process ...

    Source: TF 2.21 preemption_watcher.py, PreemptionWatcher.
    """

    def __init__(self, termination_config: TerminationConfig | None = None) -> None:
        config = termination_config or TerminationConfig()
        self._source = config.for_environment().source()
        self._stopped = threading.Event()
        self._source.start()

    @property
    def preemption_message(self) -> str | None:
        """Message of the first notice, or None if there is none yet.

        Raises:
            Exception: listening failed with this error.
        """
        notice = self._source.notice
        return None if notice is None else notice.message

    def block_until_worker_exit(self) -> None:
        """Waits until the preempted machine is gone, so that training does not restart on it.

        This is the earliest deadline of all notices. Returns at once without a notice, if no notice
        has a deadline, and after `stop`.

        Raises:
            Exception: listening failed with this error.
        """
        if self._source.notice is None:
            return
        deadlines_s = [notice.deadline_s for notice in self._source.notices]
        known_s = [deadline_s for deadline_s in deadlines_s if deadline_s is not None]
        if known_s:
            self._stopped.wait(max(0.0, min(known_s) - time.monotonic()))

    def stop(self) -> None:
        """Stops listening and restores the signal handlers."""
        self._stopped.set()
        self._source.stop()

    def __enter__(self) -> PreemptionWatcher:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()
