"""A member of an elastic group with a backup worker, which is late or killed at some steps.

Arguments: a folder, "fit", "worker" or "loop", and moments "MEMBER:STEP:KIND". KIND is "late"
(before a step), "computed" (after the work of a step), "held" (until there is a file "go"), or
"killed".
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import stratagem as sg

_STRATEGY = sg.ElasticStrategy(
    num_backup_workers=1, constant_batch="worker" if "worker" in sys.argv else "global"
)

import keras  # noqa: E402
import numpy as np  # noqa: E402

from stratagem.execution.programs.elastic_program import ElasticProgram  # noqa: E402
from stratagem.group.elastic.backed_rounds import Arrivals  # noqa: E402

BATCH, NUM_BATCHES, NUM_EPOCHS = 32, 12, 2
_PAUSE_S = 1.0


def data() -> tuple[np.ndarray, np.ndarray]:
    """Returns inputs and targets; the last batch is short."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(BATCH * NUM_BATCHES - 5, 8)).astype(np.float32)
    return x, (x[:, :1] * x[:, 1:2]).astype(np.float32)


def make_model() -> keras.Model:
    """Returns the model, the same on all members."""
    keras.utils.set_random_seed(7)
    return keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(1)]
    )


class _Moments:
    """Makes this process late, or kills it, at steps."""

    def __init__(self, own: int, moments: list[str]) -> None:
        parts = [one.split(":") for one in moments]
        self._kinds = {int(one[1]): one[2] for one in parts if int(one[0]) == own}
        self.has_computed = False
        original = Arrivals.arrive

        def arrive(arrivals: Arrivals, *arguments: Any) -> Any:
            if self.has_computed:
                self.has_computed = False
                time.sleep(_PAUSE_S)
            return original(arrivals, *arguments)

        Arrivals.arrive = arrive  # ty: ignore

    def begin(self, step: int) -> None:
        """Call before a step."""
        kind = self._kinds.get(step)
        if kind == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        self.has_computed = kind == "computed"
        while kind == "held" and not (Path(sys.argv[1]) / "go").exists():
            time.sleep(0.05)
        if kind == "late":
            time.sleep(_PAUSE_S)


class _Watch(keras.callbacks.Callback):
    def __init__(self, moments: _Moments, participants: list[Any]) -> None:
        super().__init__()
        self._moments, self._log = moments, participants

    def on_train_batch_begin(self, batch: int, logs: object = None) -> None:
        self._moments.begin(len(self._log))

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        self._log.append(_STRATEGY.participants)


def _fit(model: keras.Model, moments: _Moments, participants: list[Any]) -> list[float]:
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    x, y = data()
    history = model.fit(
        x,
        y,
        BATCH,
        NUM_EPOCHS,
        shuffle=False,
        verbose=0,
        callbacks=[_Watch(moments, participants)],
        validation_data=(x, y),
    ).history
    predicted = model.predict(x, BATCH, verbose=0)
    np.testing.assert_allclose(predicted, model(x), atol=1e-6)
    return [*history["loss"], *history["mae"], *history["val_loss"], *history["val_mae"]]


def _loop(model: keras.Model, moments: _Moments, participants: list[Any]) -> list[float]:
    optimizer = keras.optimizers.Adam(0.01)
    x, y = data()
    batches = [(x[at : at + BATCH], y[at : at + BATCH]) for at in range(0, len(x), BATCH)]
    dataset = _STRATEGY.distribute_dataset(batches)

    def step(batch: Any) -> Any:
        def loss() -> Any:
            error = keras.ops.square(model(batch[0]) - batch[1])
            return sg.nn.compute_average_loss(error)

        value, gradients = sg.value_and_grad(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return value, batch[0][:, 0]

    losses: list[float] = []
    for _ in range(NUM_EPOCHS):
        for batch in dataset:
            moments.begin(len(participants))
            loss, rows = _STRATEGY.run(step, args=(batch,))
            participants.append(_STRATEGY.participants)
            losses.append(float(_STRATEGY.reduce("sum", loss, axis=None)))
            losses.append(float(len(_STRATEGY.gather(rows, axis=0))))
    return losses


class _Steps:
    """Counts the steps without work of their own, and notes members and participants of each."""

    def __init__(self) -> None:
        self.num_followed = 0
        self.log: list[tuple[int, int]] = []
        original = ElasticProgram._call

        def call(program: ElasticProgram, *arguments: Any) -> Any:
            members = program._members
            result = original(program, *arguments)
            self.num_followed += program.has_followed
            if program._is_backed:
                self.log.append((_bits(members), _bits(_STRATEGY.participants)))
            return result

        ElasticProgram._call = call  # ty: ignore


def _bits(ids: Iterable[int]) -> int:
    return sum(1 << one for one in ids)


def main() -> None:
    """Trains, and writes the weights, the participants of each step, and the losses."""
    folder, kind, *moments = sys.argv[1:]
    own = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    steps = _Steps()
    with _STRATEGY.scope():
        model = make_model()
    participants: list[Any] = []
    run = _loop if kind == "loop" else _fit
    losses = run(model, _Moments(own, moments), participants)
    np.savez(
        Path(folder) / f"member-{own}.npz",
        *[variable.numpy() for variable in model.weights],
        participants=np.array([_bits(step) for step in participants]),
        losses=np.array(losses),
        followed=np.array(steps.num_followed),
        steps=np.array(steps.log),
    )


if __name__ == "__main__":
    main()
