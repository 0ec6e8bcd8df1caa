"""Steps that change a state, a save among them, a restore, and memory: ours and two references."""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.workers.protocol import arguments, rank_variables, serve_questions

NUM_ARRAYS = 16
_NUM_STEPS = 5
_READ_BYTES = 2**23
_INTERVAL_S = 0.05


class _Variables:
    """Ours: variables that `strategy.run` changes."""

    def __init__(self, values: list[Any], *, is_async: bool, platform: str) -> None:
        import stratagem as sg  # before jax, because it chooses Keras's backend

        self._strategy, self._options = sg.OneDeviceStrategy(f"{platform}:0"), sg.train
        with self._strategy.scope():
            self._variables = [sg.Variable(value) for value in values]
        named = {f"v{place}": one for place, one in enumerate(self._variables)}
        self._checkpoint = sg.train.Checkpoint(**named)
        if is_async:
            self._checkpoint.prepare()
            self._checkpoint.sync()  # done long before the first save of a real training

    def step(self) -> None:
        self._strategy.run(self._change)
        self._wait()

    def _change(self) -> None:
        for one in self._variables:
            one.assign(one.value * 0.999 + 0.001)

    def _wait(self) -> None:
        for one in self._variables:
            one.value.block_until_ready()

    def save(self, folder: str, *, is_async: bool) -> Callable[[], object]:
        options = self._options.CheckpointOptions(enable_async=is_async)
        self._checkpoint.write(folder, options)
        return self._checkpoint.sync

    def restore(self, folder: str) -> None:
        self._checkpoint.read(folder).assert_consumed()
        self._wait()

    def first_value(self) -> float:
        return float(self._variables[0].value[0])


class _Arrays:
    """Orbax called by hand, on arrays that steps give away and return."""

    def __init__(self, values: list[Any], *, is_async: bool, platform: str) -> None:
        import jax
        import orbax.checkpoint as ocp

        self._jax, self._ocp = jax, ocp
        named = {f"v{place}": one for place, one in enumerate(values)}
        self._state = jax.device_put(named, jax.devices(platform)[0])
        self._behind = ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler())
        self._now = ocp.Checkpointer(ocp.StandardCheckpointHandler())

        def changed(state: dict[str, Any]) -> dict[str, Any]:
            return {name: value * 0.999 + 0.001 for name, value in state.items()}

        self._program = jax.jit(changed, donate_argnums=0)

    def step(self) -> None:
        self._state = self._jax.block_until_ready(self._program(self._state))

    def save(self, folder: str, *, is_async: bool) -> Callable[[], object]:
        checkpointer = self._behind if is_async else self._now
        checkpointer.save(folder, args=self._ocp.args.StandardSave(self._state))
        return self._behind.wait_until_finished

    def restore(self, folder: str) -> None:
        wanted = self._jax.tree.map(self._ocp.utils.to_shape_dtype_struct, self._state)
        restored = self._now.restore(folder, args=self._ocp.args.StandardRestore(wanted))
        self._state = self._jax.block_until_ready(restored)

    def first_value(self) -> float:
        return float(self._state["v0"][0])


class _Tensors:
    """torch.distributed.checkpoint, on tensors that steps change in place."""

    def __init__(self, values: list[Any], *, is_async: bool, platform: str) -> None:
        import torch
        import torch.distributed as dist
        import torch.distributed.checkpoint as dcp

        os.environ |= rank_variables(1)[0]
        dist.init_process_group("gloo")
        device = "cuda" if platform == "gpu" else "cpu"
        tensors = [torch.as_tensor(one, device=device) for one in values]
        self._state, self._dcp = {f"v{place}": one for place, one in enumerate(tensors)}, dcp
        self._wait = torch.cuda.synchronize if platform == "gpu" else lambda: None

    def step(self) -> None:
        for value in self._state.values():
            value.mul_(0.999).add_(0.001)
        self._wait()

    def save(self, folder: str, *, is_async: bool) -> Callable[[], object]:
        if is_async:
            writing: Any = self._dcp.async_save(self._state, checkpoint_id=folder)
            return writing.result
        self._dcp.save(self._state, checkpoint_id=folder)
        return lambda: None

    def restore(self, folder: str) -> None:
        self._dcp.load(self._state, checkpoint_id=folder)

    def first_value(self) -> float:
        return float(self._state["v0"][0])


# With the modules whose memory is none of the state's.
_STATES: dict[str, tuple[Any, tuple[str, ...]]] = {
    "ours": (_Variables, ("stratagem", "jax")),
    "orbax": (_Arrays, ("orbax.checkpoint",)),
    "torch": (_Tensors, ("torch.distributed.checkpoint",)),
}


def prepare() -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Answers how long saves and restores take, and how long training waits for them, in seconds.

    `step` is that of a step without a save; `blocked`, in the call that saves; `stall`, what that
    call and the step after it took beyond a step; `behind`, what steps until it was written took
    beyond that; `whole`, until it was written; `restore`, of a restore without page cache; `disk`,
    of reading the same files alone. `share` is the bandwidth of the restore in parts of that of the
    disk. The first answer has `first_stall`, when memory is fresh, and `save_peak` and
    `restore_peak`, the largest memory in multiples of the state.
    """
    told = arguments()
    is_async, folder = told["is_async"], told["folder"]
    make, modules = _STATES[told["kind"]]
    for module in modules:
        importlib.import_module(module)
    size = told["bytes"] // 4 // NUM_ARRAYS
    base_bytes = _memory_bytes()
    # By chance, as weights are: equal numbers would be compressed to nothing.
    drawn = [np.random.default_rng(place) for place in range(NUM_ARRAYS)]
    values = [one.standard_normal(size, "float32") for one in drawn]
    state = make(values, is_async=is_async, platform=told["platform"])
    state.step()
    size_bytes, answered = 4 * size * NUM_ARRAYS, []

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        measures = contextlib.nullcontext if answered else _PeakMemory
        shutil.rmtree(folder, ignore_errors=True)
        with measures() as save_peak:
            found = _save(state, folder, is_async)
        wanted = found.pop("first_value")
        file_bytes = _drop_from_cache(folder)
        disk_s = _time_s(lambda: _read_all(folder))
        _drop_from_cache(folder)
        with measures() as restore_peak:
            restore_s = _time_s(lambda: state.restore(folder))
        if state.first_value() != wanted:
            raise ValueError(f"Restored {state.first_value()}, saved was {wanted}.")
        shutil.rmtree(folder)
        found |= {"restore": restore_s, "disk": disk_s}
        found["share"] = (size_bytes / restore_s) / (file_bytes / disk_s)
        if not answered:
            answered.append(True)
            found["first_stall"] = found["stall"]
            for name, peak in (("save_peak", save_peak), ("restore_peak", restore_peak)):
                found[name] = (peak.bytes - base_bytes) / size_bytes
        return found

    return answer


def _drop_from_cache(folder: str) -> int:
    """Drops the files of a folder from the page cache; returns their size in bytes."""
    size_bytes = 0
    for path in _files(folder):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)  # only clean pages are dropped
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        size_bytes += os.fstat(descriptor).st_size
        os.close(descriptor)
    return size_bytes


def _save(state: Any, folder: str, is_async: bool) -> dict[str, float]:
    step_s = statistics.median(_time_s(state.step) for _ in range(_NUM_STEPS))
    first_value = state.first_value()
    begun_s = time.perf_counter()
    wait = state.save(folder, is_async=is_async)
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


def _memory_bytes() -> int:
    """Returns the memory of this process and its children; what they share counts once.

    Mapped files do not count: the page cache can drop them.
    """
    statuses = [_status(pid) for pid in (os.getpid(), *_children())]
    anonymous_bytes = sum(status.get("RssAnon", 0) for status in statuses)
    return anonymous_bytes + max(status.get("RssShmem", 0) for status in statuses)


class _PeakMemory:
    """Samples memory in a thread; `bytes` is the largest found. Use as a context manager."""

    def __init__(self) -> None:
        self.bytes = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> _PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _sample(self) -> None:
        while True:
            self.bytes = max(self.bytes, _memory_bytes())
            if self._ended.wait(_INTERVAL_S):
                return


def _children() -> list[int]:
    found: list[int] = []
    for task in Path("/proc/self/task").iterdir():
        try:
            found += map(int, (task / "children").read_text(encoding="utf-8").split())
        except OSError:  # the thread has ended
            continue
    return found


def _status(pid: int) -> dict[str, int]:
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    pairs = (line.split() for line in lines if line.startswith("Rss"))
    return {name.rstrip(":"): int(kilobytes) * 1024 for name, kilobytes, *_ in pairs}


if __name__ == "__main__":
    serve_questions(prepare)
