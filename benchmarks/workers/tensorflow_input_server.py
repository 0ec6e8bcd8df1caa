"""A worker of tf.data service: it prints a line once it has joined, and ends by a signal."""

from __future__ import annotations

import sys

import tensorflow as tf

from benchmarks.workers.tensorflow_input_service import dataset_of


def main() -> None:
    dispatcher, work = sys.argv[1:]
    dataset = dataset_of(work)  # keeps its function alive
    service = tf.data.experimental.service
    server = service.WorkerServer(service.WorkerConfig(dispatcher))
    print(dataset.element_spec, flush=True)
    server.join()


if __name__ == "__main__":
    main()
