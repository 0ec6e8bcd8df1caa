"""Ours: `fit` under `MultiWorkerMirroredStrategy`, as one of the processes of `pinned_workers`."""

from __future__ import annotations

from benchmarks.workers.protocol import Training, WorkerOptions, serve

import stratagem as sg  # isort: skip - before keras, because it selects the JAX backend

from benchmarks.workers.stratagem_fit import prepare_under

__all__ = ["prepare"]


def prepare(options: WorkerOptions) -> Training:
    return prepare_under(sg.MultiWorkerMirroredStrategy(), options)


if __name__ == "__main__":
    serve(prepare)
