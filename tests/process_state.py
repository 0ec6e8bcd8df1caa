"""What one test could leave behind for the next one, as a value that can be compared."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Generator
from typing import Any

import stratagem
from stratagem import contexts as stack
from stratagem import logs
from stratagem.group import current as current_process_group
from stratagem.observe.wait_clock import wait_clock

# pytest's own, set anew for each phase of a test; and those that scikit-learn and Ray set when they
# are imported, by whichever test comes first.
_FOREIGN_VARIABLES = (
    "PYTEST_CURRENT_TEST",
    "KMP_DUPLICATE_LIB_OK",
    "KMP_INIT_AT_FORK",
    "RAY_CLIENT_MODE",
)
# For all threads of a test together; a busy machine may need most of it.
_JOIN_TIMEOUT_S = 60.0
# Of an object whose thread was left; which of these it has ends it.
_WAYS_TO_END = ("close", "abandon", "stop", "shutdown", "cancel")
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
# What a group or a run sets while it lasts, so that layers above need not know it.
_WAIT_FLAGS = ("measures_transfers", "waits_for_data")


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in _FOREIGN_VARIABLES}


def _summaries() -> Any:
    return sys.modules.get("stratagem.execution.summary.collector")


def _settings() -> dict[str, Any]:
    """Keras and summaries are looked at only where a test has loaded them."""
    summaries = _summaries()
    summary_settings = summaries and summaries.current_settings()
    keras = sys.modules.get("keras")
    loaded = keras is not None and hasattr(keras, "distribution")
    return {
        "a strategy is current": stratagem.has_strategy(),
        "current strategy": id(stratagem.get_strategy()),
        "summary writer": summary_settings and summary_settings.writer.value,
        "summary step": summary_settings and summary_settings.step.value,
        "runs eagerly": stratagem.config.runs_eagerly(),
        "Keras distribution": keras.distribution.distribution() if loaded else None,
        "Keras dtype policy": keras.config.dtype_policy().name if loaded else "float32",
        "Keras floatx": keras.config.floatx() if loaded else "float32",
        "process group": current_process_group.current_group(),
        "log choices": (logs._LogState.level or "auto", logs._LogState.format, logs._LogState.task),
        "log levels": _log_levels(),
        **{name: getattr(wait_clock, name) for name in _WAIT_FLAGS},
    }


def _log_levels() -> dict[str, int]:
    """Levels of our loggers that have one."""
    loggers = logging.root.manager.loggerDict
    return {
        name: one.level
        for name, one in loggers.copy().items()
        if name.startswith("stratagem") and isinstance(one, logging.Logger) and one.level
    }


def _set_back(settings: dict[str, Any]) -> None:
    """Gives settings their values; the current strategy is restored with the stack of contexts."""
    logs._LogState.level, logs._LogState.format, logs._LogState.task = settings["log choices"]
    for name in _log_levels().keys() | settings["log levels"].keys():
        logging.getLogger(name).setLevel(settings["log levels"].get(name, logging.NOTSET))
    stratagem.config.run_eagerly(settings["runs eagerly"])
    for name in _WAIT_FLAGS:
        setattr(wait_clock, name, settings[name])
    group = settings["process group"]
    current_process_group._groups[:] = [] if group is None else [group]
    now, keras = _settings(), sys.modules.get("keras")
    if now["Keras distribution"] is not settings["Keras distribution"]:
        keras.distribution.set_distribution(settings["Keras distribution"])
    if now["Keras dtype policy"] != settings["Keras dtype policy"]:
        keras.config.set_dtype_policy(settings["Keras dtype policy"])
    if now["Keras floatx"] != settings["Keras floatx"]:
        keras.config.set_floatx(settings["Keras floatx"])


@dataclasses.dataclass(frozen=True)
class ProcessState:
    """Environment, threads, child processes and library settings at one moment."""

    environment: dict[str, str]
    threads: frozenset[threading.Thread]
    processes: frozenset[int | None]
    settings: dict[str, Any]
    contexts: tuple[Any, ...]
    # Libraries set these for as long as the process runs, which is no fault of a test.
    folder: str
    module_path: tuple[str, ...]
    handlers: tuple[Any, ...]
    summaries: Any

    @classmethod
    def now(cls) -> ProcessState:
        return cls(
            environment=_environment(),
            # Keras's callbacks leave a pool's thread behind when fit raises; it ends with the pool.
            threads=frozenset(
                thread
                for thread in threading.enumerate()
                if not thread.name.startswith("ThreadPoolExecutor")
            ),
            processes=frozenset(child.pid for child in multiprocessing.active_children()),
            settings=_settings(),
            contexts=(*stack._thread.frames, stack._current_strategies.process),
            folder=os.getcwd(),
            module_path=tuple(sys.path),
            handlers=tuple(signal.getsignal(one) for one in _SIGNALS),
            summaries=(module := _summaries()) and module.current_settings(),
        )

    def changes(self) -> list[str]:
        """Says what differs now; a thread that is about to end gets a moment to do so."""
        new = self._new_threads()
        if new:
            gc.collect()  # some end with the object that they work for
        _join(new, _JOIN_TIMEOUT_S)
        after = ProcessState.now()
        threads = sorted(thread.name for thread in after.threads - self.threads if _counts(thread))
        processes = sorted(str(pid) for pid in after.processes - self.processes)
        return [
            *_differences("environment variable", self.environment, after.environment),
            *(f"thread {name!r} still runs" for name in threads),
            *(f"child process {pid} still runs" for pid in processes),
            *_differences("setting", self.settings, after.settings),
        ]

    def restore(self) -> None:
        """Ends what a test left, so that the tests after it find what it found."""
        with _quietly():
            _clear_variables(getattr(sys, "last_value", None))
            self._set_summaries_back()  # their default writer holds a file open
            gc.collect()
            for thread in self._new_threads():
                _end_owner(thread)
            _join(self._new_threads(), 5.0)
            gc.collect()
        for child in multiprocessing.active_children():
            if child.pid not in self.processes:
                child.kill()
                child.join()
        for process in list(subprocess._active):  # type: ignore[attr-defined] # collected while they ran
            process.kill()
            process.wait()
        for name in os.environ.keys() - self.environment.keys() - set(_FOREIGN_VARIABLES):
            del os.environ[name]
        os.environ.update(self.environment)
        os.chdir(self.folder)
        sys.path[:] = self.module_path
        for one, handler in zip(_SIGNALS, self.handlers, strict=True):
            if handler is not None:  # else it was not set by Python
                signal.signal(one, handler)
        *stack._thread.frames[:], stack._current_strategies.process = self.contexts
        _set_back(self.settings)
        self._set_summaries_back()  # contexts that were collected have set theirs

    def _set_summaries_back(self) -> None:
        if (module := _summaries()) is not None:
            module._set_current(self.summaries or module._DEFAULTS)

    def _new_threads(self) -> list[threading.Thread]:
        return [one for one in ProcessState.now().threads - self.threads if _counts(one)]


@contextlib.contextmanager
def _quietly() -> Generator[None]:
    """What is released here was reported before: sockets that nobody closed are no second error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _clear_variables(error: BaseException | None) -> None:
    """A test that failed lives on in its traceback, and with it all that its variables hold."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None  # whoever has looked at the variables of a frame left it a copy
        error = error.__cause__ or error.__context__
    for name in ("last_traceback", "last_value", "last_exc"):
        vars(sys).pop(name, None)


def _join(threads: list[threading.Thread], limit_s: float) -> None:
    end_s = time.monotonic() + limit_s
    for thread in threads:
        thread.join(max(0.0, end_s - time.monotonic()))


def _end_owner(thread: threading.Thread) -> None:
    """Ends the object that a thread works for."""
    owner = getattr(getattr(thread, "_target", None), "__self__", thread)
    for name in _WAYS_TO_END:
        if callable(end := getattr(owner, name, None)):
            with contextlib.suppress(Exception):  # it may be half closed
                end()
            return


def _counts(thread: threading.Thread) -> bool:
    """Other libraries leave daemon threads behind; ours shall not."""
    # There is one for as long as the process.
    if thread.name.startswith(("stratagem-storage", "stratagem elastic rounds")):
        return False
    return not thread.daemon or thread.name.startswith("stratagem")


def _differences(noun: str, before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [
        f"{noun} {name!r} was {before.get(name)!r} and is {after.get(name)!r}"
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
    ]
