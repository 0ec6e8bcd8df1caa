"""What each side of `benchmarks/checkpoint` measures: steps, a save among them, and a restore."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.workers.peak_memory import PeakMemory

__all__ = ["NUM_ARRAYS", "State", "answer_rounds", "drop_from_cache", "first_values"]

NUM_ARRAYS = 16
_NUM_STEPS = 5
_READ_BYTES = 2**23


@dataclasses.dataclass(frozen=True)
class State:
    """A state that steps change.

    Args:
        size_bytes: of all arrays.
        base_bytes: memory of the process before it had them.
        step: does a step of training, and waits for it.
        save: saves in a folder, behind training or not; returns what waits for it.
        restore: restores from a folder, and waits for it.
        first_value: a number of the state that each step changes.
    """

    size_bytes: int
    base_bytes: int
    step: Callable[[], None]
    save: Callable[[str, bool], Callable[[], None]]
    restore: Callable[[str], None]
    first_value: Callable[[], float]


def first_values(place: int, size: int) -> np.ndarray[Any, Any]:
    """Returns what an array of the state begins with: numbers by chance, as weights are.

    Equal ones would be compressed to nothing by those that compress.

    Args:
        place: of the array.
        size: how many numbers.
    """
    return np.random.default_rng(place).standard_normal(size, "float32")


def answer_rounds(state: State) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Returns what answers a question for a save.

    Args:
        state: what is saved.

    Returns:
        Answers `{"folder": ..., "is_async": ...}` with seconds: `step`, of a step without a save;
        `blocked`, in the call that saves; `stall`, what that call and the step after it took
        beyond a step; `behind`, what steps until it was written took beyond that; `whole`, until
        it was written; `restore`, of a restore without page cache; `disk`, of reading the same
        files alone. `share` is the bandwidth of the restore in parts of that of the disk. With
        `"memory": true`, `save_peak` and `restore_peak` are the largest memory in multiples of the
        state.
    """

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        folder = question["folder"]
        shutil.rmtree(folder, ignore_errors=True)
        with _peak_of(question) as save_peak:
            told = _save(state, folder, question["is_async"])
        wanted = told.pop("first_value")
        file_bytes = drop_from_cache(folder)
        disk_s = _time_s(lambda: _read_all(folder))
        drop_from_cache(folder)
        with _peak_of(question) as restore_peak:
            restore_s = _time_s(lambda: state.restore(folder))
        if state.first_value() != wanted:
            raise ValueError(f"Restored {state.first_value()}, saved was {wanted}.")
        shutil.rmtree(folder)
        told |= {"restore": restore_s, "disk": disk_s}
        told["share"] = (state.size_bytes / restore_s) / (file_bytes / disk_s)
        if question.get("memory"):
            told["save_peak"] = (save_peak.bytes - state.base_bytes) / state.size_bytes
            told["restore_peak"] = (restore_peak.bytes - state.base_bytes) / state.size_bytes
        return told

    return answer


def drop_from_cache(folder: str) -> int:
    """Drops the files of a folder from the page cache; returns their size in bytes.

    Args:
        folder: what holds them.
    """
    size_bytes = 0
    for path in _files(folder):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)  # only clean pages are dropped
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        size_bytes += os.fstat(descriptor).st_size
        os.close(descriptor)
    return size_bytes


def _save(state: State, folder: str, is_async: bool) -> dict[str, float]:
    step_s = statistics.median(_time_s(state.step) for _ in range(_NUM_STEPS))
    first_value = state.first_value()
    begun_s = time.perf_counter()
    wait = state.save(folder, is_async)
    blocked_s = time.perf_counter() - begun_s
    first_s = _time_s(state.step)
    later_s = [_time_s(state.step) for _ in range(_NUM_STEPS - 1)]
    wait()
    whole_s = time.perf_counter() - begun_s
    return {
        "first_value": first_value,
        "step": step_s,
        "blocked": blocked_s,
        "stall": blocked_s + max(0.0, first_s - step_s),
        "behind": sum(later_s) - step_s * len(later_s),
        "whole": whole_s,
    }


def _peak_of(question: dict[str, Any]) -> Any:
    return PeakMemory() if question.get("memory") else contextlib.nullcontext()


def _read_all(folder: str) -> None:
    buffer = bytearray(_READ_BYTES)
    for path in _files(folder):
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def _files(folder: str) -> list[Path]:
    return sorted(path for path in Path(folder).rglob("*") if path.is_file())


def _time_s(function: Callable[[], None]) -> float:
    begun_s = time.perf_counter()
    function()
    return time.perf_counter() - begun_s
