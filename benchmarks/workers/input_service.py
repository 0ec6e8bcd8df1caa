"""A device that waits for input: its steps take a fixed time, and its busy time is measured.

A step stands for a device that trains: the host sleeps through it, so that the cores are free for
input. As with JAX, the host does not wait for a step before it takes the next batch. Batches come
from our input service, or from tf.data service, whose workers are processes of their own: with the
address of a dispatcher and a work as arguments, this is such a worker.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.images import make_batch
from benchmarks.workers.protocol import arguments, free_ports, serve_questions

_WARM_UP = 0.6  # in parts of what is measured
_NUM_FILES, _BATCHES_PER_FILE = 4096, 16


@dataclasses.dataclass(frozen=True)
class _Options:
    kind: str  # "ours" or "tensorflow"
    work: str  # "jpeg" or "objects", as for `make_batch`
    num_workers: int  # processes that make batches; 0 for the loop of the trainer itself
    step_s: float


class _Device:
    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._memory: dict[int, np.ndarray[Any, Any]] = {}
        self.free_s = time.perf_counter()

    def step(self, arrays: Any) -> None:
        """Copies a batch as a transfer does, and begins its step; one step at most waits."""
        for place, array in enumerate(arrays):
            np.copyto(self._memory.setdefault(place, np.empty_like(array)), array)
        time.sleep(max(0.0, self.free_s - self._step_s - time.perf_counter()))
        self.free_s = max(self.free_s, time.perf_counter()) + self._step_s


def _busy(batches: Iterator[Any], step_s: float, seconds: float) -> dict[str, float]:
    """Returns the share of so many seconds in which the device is busy."""
    device = _Device(step_s)
    device.step(next(batches))
    first_s = device.free_s
    # All workers are there by then, and what they made before the first step is used.
    while device.free_s < first_s + _WARM_UP * seconds:
        device.step(next(batches))
    begin_s, num_steps = device.free_s, 0
    while device.free_s < begin_s + seconds:
        device.step(next(batches))
        num_steps += 1
    return {"busy": num_steps * step_s / (device.free_s - begin_s)}


def _read(work: str, files: list[int]) -> Iterator[Any]:
    for file in files:
        for place in range(_BATCHES_PER_FILE):
            yield make_batch(work, _BATCHES_PER_FILE * file + place)


def _read_files(work: str, files: list[int]) -> Any:
    import stratagem as sg

    return sg.input.Dataset.from_generator(_read, [work, files])


@contextlib.contextmanager
def _ours(options: _Options) -> Iterator[Iterator[Any]]:
    import stratagem as sg

    files, read = list(range(_NUM_FILES)), functools.partial(_read_files, options.work)
    dataset = sg.input.Dataset.from_files(files, read)
    if options.num_workers == 0:
        yield iter(dataset)
        return
    with sg.input.service.start(options.num_workers) as service:
        distribute = sg.input.service.distribute("distributed_epoch", service.target)
        yield iter(dataset.apply(distribute))


def _tensorflow_dataset(work: str) -> Any:
    """Returns the batches of a work.

    A function in Python has a name in its process only. A worker that makes this dataset first has
    the same function under the same name.
    """
    import tensorflow as tf  # after the start of the workers, which import it at the same time

    make = functools.partial(make_batch, work)
    dataset = tf.data.Dataset.range(_NUM_FILES * _BATCHES_PER_FILE).map(
        lambda number: tf.numpy_function(make, [number], (tf.uint8, tf.int32), stateful=False)
    )
    options = tf.data.Options()
    options.experimental_optimization.map_parallelization = False  # a worker makes one at a time
    return dataset.with_options(options)


def _serve_tensorflow(dispatcher: str, work: str) -> None:
    dataset = _tensorflow_dataset(work)  # keeps its function alive

    import tensorflow as tf

    service = tf.data.experimental.service
    server = service.WorkerServer(service.WorkerConfig(dispatcher))
    print(dataset.element_spec, flush=True)
    server.join()


@contextlib.contextmanager
def _tensorflow(options: _Options) -> Iterator[Iterator[Any]]:
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "benchmarks.workers.input_service"]
    command += [f"localhost:{port}", options.work]
    workers = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        for _ in range(options.num_workers)
    ]
    dataset = _tensorflow_dataset(options.work)
    if not workers:
        yield dataset.as_numpy_iterator()
        return

    import tensorflow as tf

    service = tf.data.experimental.service
    dispatcher = service.DispatchServer(service.DispatcherConfig(port=port))
    try:
        for process in workers:  # each prints a line once it has joined
            assert process.stdout is not None
            process.stdout.readline()
        distribute = service.distribute(
            "distributed_epoch",
            dispatcher.target,
            # As ours. The one that TensorFlow finds by itself keeps one of four workers busy.
            max_outstanding_requests=max(4, 2 * options.num_workers),
            compression=None,
        )
        yield dataset.apply(distribute).prefetch(tf.data.AUTOTUNE).as_numpy_iterator()
    finally:
        for process in workers:
            process.kill()
            process.wait()


def _main() -> None:
    options = _Options(**arguments())
    with {"ours": _ours, "tensorflow": _tensorflow}[options.kind](options) as batches:
        serve_questions(lambda: lambda asked: _busy(batches, options.step_s, asked["seconds"]))


if __name__ == "__main__":
    if len(sys.argv) > 2:
        _serve_tensorflow(*sys.argv[1:])
    else:
        _main()
