"""Ours: `fit` of a model with a large table, whose variables are kept at one place or another."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import stratagem as sg  # isort: skip - before keras, because it selects the JAX backend

import jax
import keras
import numpy as np

from benchmarks.workers.placement_work import (
    NUM_FIELDS,
    PINNED,
    PlacementOptions,
    training_data,
)
from benchmarks.workers.profiled_programs import dumped_programs, exchanged_bytes, profiled
from benchmarks.workers.protocol import serve_questions
from benchmarks.workers.transfers import counted_transfers, name_of

__all__ = ["PlacedTraining", "held_bytes", "prepare"]

# A larger table is compared in the rows that the data names, and starts as one number.
_MOST_COMPARED_ROWS = 10**6
# Adam divides by the root of a second moment: with the usual 1e-7 the rounding that is left when
# gradients cancel out becomes a whole step.
_OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adagrad": lambda: keras.optimizers.Adagrad(0.01),
    "adam": lambda: keras.optimizers.Adam(0.001, epsilon=1e-4),
}
_STRATEGIES: dict[str, Callable[[PlacementOptions], sg.Strategy]] = {
    "mirrored": lambda options: sg.MirroredStrategy(options.devices),
    "state in parts": lambda options: sg.MirroredStrategy(options.devices, shard_state="all"),
    "hybrid, sharded": lambda options: sg.HybridStrategy(
        options.devices, placement={"embeddings": "sharded"}
    ),
    "hybrid, central": lambda options: sg.HybridStrategy(
        options.devices,
        placement={"embeddings": "central"},
        parameter_device=options.parameter_device,
    ),
    "hybrid, pinned": lambda options: sg.HybridStrategy(
        options.devices, placement={"": "pinned_host"}
    ),
    "central": lambda options: sg.CentralStorageStrategy(options.devices, options.parameter_device),
}


class PlacedTraining:
    """A model under a strategy.

    Args:
        options: which, and where.
    """

    def __init__(self, options: PlacementOptions) -> None:
        self._options = options
        self._data = training_data(options)
        is_small = options.num_rows <= _MOST_COMPARED_ROWS
        start: Any = "uniform" if is_small else keras.initializers.Constant(0.05)
        keras.utils.set_random_seed(1)
        with _STRATEGIES[options.placement](options).scope():
            self._table = keras.layers.Embedding(options.num_rows, options.row_size, start)
            self._model = keras.Sequential(
                [
                    keras.Input((NUM_FIELDS,), dtype="int32"),
                    self._table,
                    keras.layers.Flatten(),
                    keras.layers.Dense(128, activation="relu"),
                    keras.layers.Dense(64, activation="relu"),
                    keras.layers.Dense(1),
                ]
            )
            self._model.compile(_OPTIMIZERS[options.optimizer](), "mse")

    def train(self, num_epochs: int) -> dict[str, Any]:
        """Trains; tells how long, and how often."""
        start_s = time.perf_counter()
        model: Any = self._model
        history = model.fit(
            *self._data,
            batch_size=self._options.batch_size,
            epochs=num_epochs,
            shuffle=False,
            verbose=0,
        )
        jax.block_until_ready([variable.stored for variable in self._variables()])
        return {
            "seconds": time.perf_counter() - start_s,
            "steps": num_epochs * self._options.steps_per_epoch,
            "loss": history.history["loss"][-1],
        }

    def save_weights(self, path: str) -> dict[str, Any]:
        """Writes the weights, and of a very large table the rows that were trained."""
        is_small = self._options.num_rows <= _MOST_COMPARED_ROWS
        ids = np.arange(self._options.num_rows) if is_small else np.unique(self._data[0])
        table: Any = self._table.embeddings
        dense = [variable for variable in self._model.weights if variable is not table]
        arrays: dict[str, Any] = {one.path: np.asarray(one.value) for one in dense}
        arrays["table"] = np.asarray(sg.nn.embedding_lookup(table, ids))
        np.savez(path, **arrays)
        return {}

    def traffic(self) -> dict[str, Any]:
        """Trains an epoch; tells what moved between devices in it, in bytes.

        Raises:
            RuntimeError: XLA copied more between devices than was counted.
        """
        with counted_transfers() as transfers, profiled() as runs:
            self.train(1)
        exchanged: dict[str, int] = {}
        if self._options.dump:
            programs = dumped_programs(Path(self._options.dump), runs.programs)
            if runs.num_copies != transfers.num_copies:
                raise RuntimeError(
                    f"XLA copied {runs.num_copies} arrays from device to device, and "
                    f"{transfers.num_copies} were counted: some were sent by another way."
                )
            exchanged = exchanged_bytes(runs, programs)
        return {
            "exchanged": exchanged,
            "sent": transfers.between,
            "fed": transfers.from_host,
            "steps": self._options.steps_per_epoch,
        }

    def held(self) -> dict[str, Any]:
        """Tells the bytes of all arrays that live on each device, and what was the most."""
        stats = {name_of(device): device.memory_stats() for device in jax.local_devices()}
        return {
            "held": held_bytes(),
            "peak": {name: one["peak_bytes_in_use"] for name, one in stats.items() if one},
        }

    def _variables(self) -> list[Any]:
        optimizer: Any = self._model.optimizer
        return [*self._model.weights, *optimizer.variables]


def held_bytes() -> Counter[str]:
    """Returns the bytes of the arrays that live on each device, by its name; shared ones once.

    What is in pinned memory of the host is there by the name of the device and that memory.
    """
    buffers: dict[tuple[str, int], int] = {}
    for platform in {"cpu", jax.default_backend()}:
        for array in jax.live_arrays(platform):
            for shard in array.addressable_shards:
                memory = shard.data.sharding.memory_kind
                name = name_of(shard.device)
                name += f" {PINNED}" if memory == PINNED else ""
                place = (name, shard.data.unsafe_buffer_pointer())
                buffers[place] = max(buffers.get(place, 0), shard.data.nbytes)
    held: Counter[str] = Counter()
    for (device, _), num_bytes in buffers.items():
        held[device] += num_bytes
    return held


def prepare() -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Answers what training takes, moves and holds."""
    told = json.loads(sys.argv[1])
    training = PlacedTraining(PlacementOptions(**{**told, "devices": tuple(told["devices"])}))
    answers: dict[str, Callable[[Any], dict[str, Any]]] = {
        "train": lambda question: training.train(question["epochs"]),
        "weights": lambda question: training.save_weights(question["path"]),
        "traffic": lambda question: training.traffic(),
        "held": lambda question: training.held(),
    }
    return lambda question: answers[question["kind"]](question)


if __name__ == "__main__":
    serve_questions(prepare)
