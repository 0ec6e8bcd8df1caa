"""A member of an elastic group that trains, and is killed at the steps in its arguments.

Arguments: a folder, "fit" or "loop", and moments "MEMBER:STEP" or "MEMBER:STEP:in", at the start of
a step or after the member has sent its first values of it. At "MEMBER:STEP:cut" its host loses its
network.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import stratagem as sg

_STRATEGY = sg.ElasticStrategy()

import keras  # noqa: E402
import numpy as np  # noqa: E402

from stratagem.elastic.peer_connections import PeerConnections  # noqa: E402

_BATCH, _NUM_BATCHES, _NUM_EPOCHS = 32, 6, 2


def data() -> tuple[np.ndarray, np.ndarray]:
    """Returns inputs and targets."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(_BATCH * _NUM_BATCHES - 5, 8)).astype(np.float32)
    return x, (x[:, :1] * x[:, 1:2]).astype(np.float32)


def make_model() -> keras.Model:
    """Returns the model, the same on all members."""
    keras.utils.set_random_seed(7)
    return keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(1)]
    )


class _Deaths:
    """Kills this process at a step, or cuts its host off."""

    def __init__(self, own: int, moments: list[str]) -> None:
        parts = [one.split(":") for one in moments]
        self._moments = {int(one[1]): one[2:] for one in parts if int(one[0]) == own}

    def begin(self, step: int) -> None:
        """Call before a step."""
        if step not in self._moments:
            return
        if not self._moments[step]:
            os.kill(os.getpid(), signal.SIGKILL)
        if self._moments[step] == ["cut"]:
            subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)
            return
        original = PeerConnections._swap

        def swap(self: Any, outgoing: Any, incoming: Any) -> None:
            original(self, outgoing, {})
            os.kill(os.getpid(), signal.SIGKILL)

        PeerConnections._swap = swap  # ty: ignore


class _Watch(keras.callbacks.Callback):
    def __init__(self, deaths: _Deaths, members: list[Any]) -> None:
        super().__init__()
        self._deaths, self._log = deaths, members

    def on_train_batch_begin(self, batch: int, logs: object = None) -> None:
        self._deaths.begin(len(self._log))

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        self._log.append(_STRATEGY.participants)

    def on_predict_batch_begin(self, batch: int, logs: object = None) -> None:
        self._deaths.begin(_NUM_EPOCHS * _NUM_BATCHES + batch)


def _fit(model: keras.Model, deaths: _Deaths, members: list[Any]) -> list[float]:
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    x, y = data()
    watch = _Watch(deaths, members)
    history = model.fit(
        x,
        y,
        _BATCH,
        _NUM_EPOCHS,
        shuffle=False,
        verbose=0,
        callbacks=[watch],
        validation_data=(x, y),
    ).history
    predicted = model.predict(x, _BATCH, verbose=0, callbacks=[watch])
    np.testing.assert_allclose(predicted, model(x), atol=1e-6)
    assert len(predicted) == len(x)
    return [*history["loss"], *history["mae"], *history["val_loss"], *history["val_mae"]]


def _loop(model: keras.Model, deaths: _Deaths, members: list[Any]) -> list[float]:
    optimizer = keras.optimizers.Adam(0.01)
    x, y = data()
    batches = [
        (x[start : start + _BATCH], y[start : start + _BATCH]) for start in range(0, len(x), _BATCH)
    ]
    dataset = _STRATEGY.distribute_dataset(batches)

    def step(batch: Any) -> Any:
        def loss() -> Any:
            error = keras.ops.square(model(batch[0]) - batch[1])
            return sg.nn.compute_average_loss(error, global_batch_size=_BATCH)

        value, gradients = sg.value_and_grad(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return value

    losses: list[float] = []
    for _ in range(_NUM_EPOCHS):
        for batch in dataset:
            deaths.begin(len(members))
            result = _STRATEGY.run(step, args=(batch,))
            members.append(_STRATEGY.participants)
            losses.append(float(_STRATEGY.reduce("sum", result, axis=None)))
    return losses


def main() -> None:
    """Trains, and writes the weights, the members at each step, and the losses."""
    folder, kind, *moments = sys.argv[1:]
    own = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    with _STRATEGY.scope():
        model = make_model()
    members: list[Any] = []
    run = _fit if kind == "fit" else _loop
    losses = run(model, _Deaths(own, moments), members)
    np.savez(
        Path(folder) / f"member-{own}.npz",
        *[variable.numpy() for variable in model.weights],
        members=np.array([sum(1 << one for one in step) for step in members]),
        losses=np.array(losses),
    )


if __name__ == "__main__":
    main()
