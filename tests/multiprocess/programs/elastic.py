"""A member of an elastic group that trains, and is killed at the steps in its arguments.

Arguments: a folder, a kind of training, and moments. "MEMBER:STEP" and "MEMBER:STEP:in" kill
a member at the start of a step, or after it has sent its first values of it. At "MEMBER:STEP:cut"
its host loses its network. At "join:STEP" the members wait for a process that was started again.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import stratagem as sg

_STRATEGY = sg.ElasticStrategy()

import keras  # noqa: E402
import numpy as np  # noqa: E402

from stratagem.execution.programs.elastic import ElasticLockstep  # noqa: E402
from stratagem.group.current import current_group  # noqa: E402
from stratagem.group.elastic.peer_connections import PeerConnections  # noqa: E402
from tests.multiprocess.programs.elastic_data import (  # noqa: E402
    BATCH,
    NUM_BATCHES,
    data,
    make_model,
    random_callbacks,
)

_NUM_EPOCHS = 2


class _Deaths:
    """Kills this process at a step, or cuts its host off."""

    def __init__(self, own: int, moments: list[str]) -> None:
        parts = [one.split(":") for one in moments]
        self._joins = {int(one[1]) for one in parts if one[0] == "join"}
        is_first = os.environ.get("STRATAGEM_RESTART_COUNT", "0") == "0"
        self._moments = {int(one[1]): one[2:] for one in parts if one[0] == str(own) and is_first}
        kills = [int(one[1]) for one in parts if one[0] != "join"]
        if self._joins and max(kills) > min(self._joins):
            _prepare_at_once()

    def begin(self, step: int) -> None:
        """Call before a step."""
        if step in self._joins:
            _await_candidate()
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


def _prepare_at_once() -> None:
    """Makes members wait for the program of one more: a process joins before the next kill."""
    original = ElasticLockstep._prepare_larger

    def prepare(lockstep: ElasticLockstep, *arguments: Any) -> None:
        original(lockstep, *arguments)
        for program in lockstep._larger.values():
            program.wait_until_compiled()

    ElasticLockstep._prepare_larger = prepare  # ty: ignore


def _await_candidate() -> None:
    """Waits on the member that others ask to join."""
    group: Any = current_group()
    if group.view.members[0] == group.member:
        while not group._inbox.has_candidate(group.admissions.safe.place, group.view.members):
            time.sleep(0.01)


class _Watch(keras.callbacks.Callback):
    def __init__(self, deaths: _Deaths, members: list[Any]) -> None:
        super().__init__()
        self._deaths, self._log = deaths, members

    def on_train_batch_begin(self, batch: int, logs: object = None) -> None:
        self._deaths.begin(int(self.model.optimizer.iterations))

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        self._log.append(_STRATEGY.participants)

    def on_predict_batch_begin(self, batch: int, logs: object = None) -> None:
        self._deaths.begin(_NUM_EPOCHS * NUM_BATCHES + batch)


def _fit(model: keras.Model, deaths: _Deaths, members: list[Any]) -> list[float]:
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    x, y = data()
    watch = _Watch(deaths, members)
    history = model.fit(
        x,
        y,
        BATCH,
        _NUM_EPOCHS,
        shuffle=False,
        verbose=0,
        callbacks=[watch],
        validation_data=(x, y),
    ).history
    return _logs_of(model, history, watch)


def _logs_of(model: keras.Model, history: dict[str, Any], watch: _Watch) -> list[float]:
    x, _ = data()
    predicted = model.predict(x, BATCH, verbose=0, callbacks=[watch])
    np.testing.assert_allclose(predicted, model(x), atol=1e-6)
    assert len(predicted) == len(x)
    return [*history["loss"], *history["mae"], *history["val_loss"], *history["val_mae"]]


class _Batches(keras.utils.PyDataset):
    """Batches that a process cannot read before it joins."""

    def __len__(self) -> int:
        return NUM_BATCHES

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.1)  # the others train while a process starts to join
        x, y = data()
        rows = slice(BATCH * index, BATCH * (index + 1))
        return x[rows], y[rows]


def _sequence(model: keras.Model, deaths: _Deaths, members: list[Any]) -> list[float]:
    """Trains on a dataset whose first batch is unknown before a process joins."""
    model.compile(keras.optimizers.Adam(0.01), "mse")
    watch = _Watch(deaths, members)
    history = model.fit(
        _Batches(), epochs=2 * _NUM_EPOCHS, shuffle=False, verbose=0, callbacks=[watch]
    ).history
    return history["loss"]


def _random(model: keras.Model, deaths: _Deaths, members: list[Any]) -> list[float]:
    """Trains on shuffled data."""
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    x, y = data()
    watch = _Watch(deaths, members)
    callbacks = [watch, *random_callbacks()]
    keras.utils.set_random_seed(8)
    history = model.fit(x, y, BATCH, 2 * _NUM_EPOCHS, verbose=0, callbacks=callbacks).history
    return [*history["loss"], *history["mae"], *history["learning_rate"]]


def _loop(model: keras.Model, deaths: _Deaths, members: list[Any]) -> list[float]:
    optimizer = keras.optimizers.Adam(0.01)
    x, y = data()
    batches = [
        (x[start : start + BATCH], y[start : start + BATCH]) for start in range(0, len(x), BATCH)
    ]
    dataset = _STRATEGY.distribute_dataset(batches)

    def step(batch: Any) -> Any:
        def loss() -> Any:
            error = keras.ops.square(model(batch[0]) - batch[1])
            return sg.nn.compute_average_loss(error, global_batch_size=BATCH)

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


def _counted(model: keras.Model, deaths: _Deaths, members: list[Any]) -> list[float]:
    """Trains in a loop that counts its steps in a variable."""
    x, y = data()
    optimizer = keras.optimizers.Adam(0.01)  # its number of steps is a variable of no strategy
    with _STRATEGY.scope():
        optimizer.build(model.trainable_variables)
        num_steps = sg.Variable(0)
        total = keras.metrics.Sum()

    def step(batch: Any) -> None:
        def loss() -> Any:
            error = keras.ops.square(model(batch[0]) - batch[1])
            return sg.nn.compute_average_loss(error, global_batch_size=BATCH)

        value, gradients = sg.value_and_grad(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        total.update_state(value)
        num_steps.assign_add(1)

    def batch_of(number: int) -> Any:
        start = number % (NUM_BATCHES - 1) * BATCH
        [batch] = _STRATEGY.distribute_dataset([(x[start:][:BATCH], y[start:][:BATCH])])
        return batch

    while True:
        _STRATEGY.admit(step, args=(batch_of(0),))
        number = int(num_steps)
        if number == _NUM_EPOCHS * NUM_BATCHES:
            return [float(total.result())]
        deaths.begin(number)
        _STRATEGY.run(step, args=(batch_of(number),))
        members.append(_STRATEGY.participants)


def main() -> None:
    """Trains, and writes the weights, the members at each step, and the losses."""
    folder, kind, *moments = sys.argv[1:]
    own = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    with _STRATEGY.scope():
        model = make_model()
    members: list[Any] = []
    run = {
        "fit": _fit,
        "loop": _loop,
        "random": _random,
        "counted": _counted,
        "sequence": _sequence,
    }[kind]
    losses = run(model, _Deaths(own, moments), members)
    np.savez(
        Path(folder) / f"member-{own}.npz",
        *[variable.numpy() for variable in model.weights],
        members=np.array([sum(1 << one for one in step) for step in members]),
        losses=np.array(losses),
    )


if __name__ == "__main__":
    main()
