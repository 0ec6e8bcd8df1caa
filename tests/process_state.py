"""What one test could leave behind for the next one, as a value that can be compared."""

from __future__ import annotations

import dataclasses
import gc
import multiprocessing
import os
import sys
import threading
from typing import Any

import stratagem

# pytest's own, set anew for each phase of a test.
_FOREIGN_VARIABLES = ("PYTEST_CURRENT_TEST",)
_JOIN_TIMEOUT_S = 20.0


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in _FOREIGN_VARIABLES}


def _settings() -> dict[str, Any]:
    """Keras and summaries are looked at only where a test has loaded them."""
    summaries = sys.modules.get("stratagem.summary.settings")
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
    }


@dataclasses.dataclass(frozen=True)
class ProcessState:
    """Environment, threads, child processes and library settings at one moment."""

    environment: dict[str, str]
    threads: frozenset[threading.Thread]
    processes: frozenset[int | None]
    settings: dict[str, Any]

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
        )

    def changes(self) -> list[str]:
        """Says what differs now; a thread that is about to end gets a moment to do so."""
        new = [one for one in ProcessState.now().threads - self.threads if _counts(one)]
        if new:
            gc.collect()  # some end with the object that they work for
        for thread in new:
            thread.join(_JOIN_TIMEOUT_S)
        after = ProcessState.now()
        threads = sorted(thread.name for thread in after.threads - self.threads if _counts(thread))
        processes = sorted(str(pid) for pid in after.processes - self.processes)
        return [
            *_differences("environment variable", self.environment, after.environment),
            *(f"thread {name!r} still runs" for name in threads),
            *(f"child process {pid} still runs" for pid in processes),
            *_differences("setting", self.settings, after.settings),
        ]


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
