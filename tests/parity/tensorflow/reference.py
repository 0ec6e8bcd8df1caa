"""Measures the cases without Stratagem and writes down what came out, for the tests to read.

Run it from the repository's root, with `.venv-peers`, which `make .venv-peers/.complete` makes,
once with either backend:

    KERAS_BACKEND=tensorflow python -m tests.parity.tensorflow.reference
    KERAS_BACKEND=jax        python -m tests.parity.tensorflow.reference

The first trains under TensorFlow's MirroredStrategy with two replicas and writes `mirrored.npz`.
The second trains with plain Keras on one device and writes `one_device.npz`.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np

from tests.parity.tensorflow.cases import CASES, NUM_REPLICAS, compiled_model, fingerprint, measure
from tests.parity.tensorflow.one_device import with_batch_norm_of_two_replicas

FOLDER = Path(__file__).parent


def _tensorflow_builder() -> Callable[..., Any]:
    tensorflow = importlib.import_module("tensorflow")
    cpu = tensorflow.config.list_physical_devices("CPU")[0]
    logical = [tensorflow.config.LogicalDeviceConfiguration() for _ in range(NUM_REPLICAS)]
    tensorflow.config.set_logical_device_configuration(cpu, logical)
    names = [f"cpu:{index}" for index in range(NUM_REPLICAS)]
    strategy = tensorflow.distribute.MirroredStrategy(names)

    def build(case: Any) -> Any:
        with strategy.scope():
            return compiled_model(case, keras)

    return build


def _one_device_builder() -> Callable[..., Any]:
    two_replicas = with_batch_norm_of_two_replicas(keras)
    return lambda case: compiled_model(case, two_replicas)


_BUILDERS = {
    "tensorflow": ("mirrored.npz", _tensorflow_builder),
    "jax": ("one_device.npz", _one_device_builder),
}


def main() -> None:
    """Measures all cases with the backend that Keras has, and writes that backend's file."""
    backend = keras.backend.backend()
    if backend not in _BUILDERS:
        raise SystemExit(
            f"Keras runs on {backend!r}; expected one of {sorted(_BUILDERS)}. "
            "Set KERAS_BACKEND to one of them and start again."
        )
    name, make_builder = _BUILDERS[backend]
    build = make_builder()
    versions = {package: importlib.metadata.version(package) for package in (backend, "keras")}
    about: dict[str, Any] = {"versions": versions, "fingerprints": {}}
    arrays: dict[str, np.ndarray] = {}
    for case in CASES:
        keras.backend.clear_session()
        model = build(case)
        about["fingerprints"][case.name] = fingerprint(case, model)
        measured = measure(case, model, case.sample_weight())
        arrays |= {f"{case.name}/{key}": value for key, value in measured.items()}
        print(f"{case.name}: loss {measured['fit/loss']}")
    np.savez_compressed(FOLDER / name, about=np.array(json.dumps(about)), **arrays)
    print(f"{name}: {len(arrays)} arrays, {(FOLDER / name).stat().st_size} bytes")


if __name__ == "__main__":
    main()
