"""TensorFlow's: tf.data service feeds a device; its workers are processes of their own."""

from __future__ import annotations

import contextlib
import functools
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from benchmarks.input_work import make_batch
from benchmarks.workers.starved_device import StarvedOptions, serve_batches

_NUM_BATCHES = 10**6


def dataset_of(work: str) -> Any:
    """Returns the batches of a work.

    A function in Python has a name in its process only. A worker that makes this dataset first has
    the same function under the same name.
    """
    import tensorflow as tf  # after the start of the workers, which import it at the same time

    dtypes = tf.int32 if work == "tokens" else tf.uint8, tf.int32
    make = functools.partial(make_batch, work)
    dataset = tf.data.Dataset.range(_NUM_BATCHES).map(
        lambda number: tf.numpy_function(make, [number], dtypes, stateful=False)
    )
    options = tf.data.Options()
    options.experimental_optimization.map_parallelization = False  # a worker makes one at a time
    return dataset.with_options(options)


@contextlib.contextmanager
def _workers(options: StarvedOptions, port: int) -> Iterator[list[subprocess.Popen[str]]]:
    command = [sys.executable, "-m", "benchmarks.workers.tensorflow_input_server"]
    command += [f"localhost:{port}", options.work]
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        for _ in range(options.num_workers)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


@contextlib.contextmanager
def _batches(options: StarvedOptions) -> Iterator[Iterator[Any]]:
    with socket.socket() as one:
        one.bind(("localhost", 0))
        port = one.getsockname()[1]
    with _workers(options, port) as workers:
        import tensorflow as tf

        dataset = dataset_of(options.work)
        if options.num_workers == 0:
            yield dataset.as_numpy_iterator()
            return
        service = tf.data.experimental.service
        dispatcher = service.DispatchServer(service.DispatcherConfig(port=port))
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


if __name__ == "__main__":
    serve_batches(_batches)
