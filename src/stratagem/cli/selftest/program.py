"""One case of the self-test: `python -m stratagem.cli.selftest.program NAME`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import jax
import keras

import stratagem as sg
from stratagem.cli.selftest.cases import BATCH_SIZE, EPOCHS, LEARNING_RATE, data

MARKER = "STRATAGEM_WEIGHTS"


def _replica_devices() -> list[str] | None:
    """Returns two CPU devices on a machine without several accelerators."""
    is_alone = jax.default_backend() == "cpu" or jax.local_device_count() == 1
    return ["cpu:0", "cpu:1"] if is_alone else None


STRATEGIES: dict[str, Callable[[], Any]] = {
    "default": sg.get_strategy,
    "one_device": lambda: sg.OneDeviceStrategy(jax.local_devices()[0]),
    "mirrored": lambda: sg.MirroredStrategy(_replica_devices()),
    "sharded": lambda: sg.MirroredStrategy(_replica_devices(), shard_state="all"),
    "central_storage": lambda: sg.CentralStorageStrategy(_replica_devices()),
    "hybrid": lambda: sg.HybridStrategy(_replica_devices(), placement={"kernel": "central"}),
    "tpu": lambda: sg.TPUStrategy(),
    "multi_worker": sg.MultiWorkerMirroredStrategy,
    "parameter_server": lambda: sg.ParameterServerStrategy(num_workers=1, num_servers=2),
}


def main(name: str) -> None:
    """Trains under a strategy, by `fit`, and prints the weights."""
    features, labels = data()
    strategy = STRATEGIES[name]()
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.layers.Input((features.shape[1],)),
                keras.layers.Dense(1, kernel_initializer="zeros"),
            ]
        )
        model.compile(keras.optimizers.SGD(LEARNING_RATE), "mse")
    arguments: dict[str, Any] = {"verbose": 0}  # Keras annotates it as str
    model.fit(features, labels, batch_size=BATCH_SIZE, epochs=EPOCHS, shuffle=False, **arguments)
    kernel, bias = model.get_weights()
    weights = [*kernel[:, 0].tolist(), *bias.tolist()]
    print(MARKER, json.dumps(weights), f"{strategy.num_replicas_in_sync} replicas", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
