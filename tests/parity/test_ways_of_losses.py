"""Every way to write a loss, by every entry and strategy: numbers of one device, of plain Keras.

A model has one layer for each way. So a single step tries all ways, and the weights of a layer tell
which of them went wrong.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Collection, Iterator
from typing import Any

import jax
import keras
import numpy as np
import pytest
from keras import ops

import stratagem as sg
from stratagem.parameter_server.server.shards import UpdateMode
from tests.parity.comparison import KINDS, Scope, carried_out, differences, plain_keras
from tests.unit.parameter_server.clusters import local_strategy

_BATCH_SIZE = 4


class _Pairs(keras.losses.Loss):
    """Compares all rows of a batch with one another."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        errors = y_pred - y_true
        return ops.mean(ops.square(errors[:, None] - errors[None])) + ops.mean(ops.square(errors))


class _Both(keras.losses.Loss):
    """Made of other losses."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        absolute = keras.losses.MeanAbsoluteError()(y_true, y_pred)
        return keras.losses.MeanSquaredError()(y_true, y_pred) + absolute


class _Averaged(keras.losses.Loss):
    """An average of its own."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return sg.compute_average_loss(_squares(y_true, y_pred))


def _squares(y: Any, p: Any) -> Any:
    return keras.losses.mean_squared_error(y, p)


def _averaged_by_size(y: Any, p: Any) -> Any:
    return sg.nn.compute_average_loss(_squares(y, p), global_batch_size=_BATCH_SIZE)


def _summed(y: Any, p: Any) -> Any:
    return ops.sum(ops.square(y - p))


_MSE = keras.losses.MeanSquaredError

# Losses for `compile`; the bool says if they get weights.
_COMPILED: dict[str, tuple[Callable[..., Any], bool]] = {
    "mean": (_MSE(), False),
    "mean, weights": (_MSE(), True),
    "sum": (_MSE(reduction="sum"), False),
    "sum, weights": (_MSE(reduction="sum"), True),
    "mean with weights": (_MSE(reduction="mean_with_sample_weight"), True),
    "pairs": (_Pairs(), False),
    "losses within": (_Both(), False),
    "average within": (_Averaged(), False),
    "function": (_squares, False),
    "function that sums": (_summed, False),
    "function that averages": (lambda y, p: sg.compute_average_loss(_squares(y, p)), False),
    "function with batch size": (_averaged_by_size, False),
}

# Losses in code: of targets, outputs, weights, and the losses that the layer added.
_IN_CODE: dict[str, Callable[..., Any]] = {
    **{
        name: (lambda y, p, w, added, loss=loss: loss(y, p, sample_weight=w))
        if is_weighted
        else (lambda y, p, w, added, loss=loss: loss(y, p))
        for name, (loss, is_weighted) in _COMPILED.items()
        if isinstance(loss, keras.losses.Loss)
    },
    "averaged": lambda y, p, w, added: sg.compute_average_loss(_squares(y, p)),
    "averaged object": lambda y, p, w, added: sg.nn.compute_average_loss(
        _MSE(reduction=None)(y, p)
    ),
    "averaged, weights": lambda y, p, w, added: sg.compute_average_loss(_squares(y, p), w),
    "averaged, batch size": lambda y, p, w, added: _averaged_by_size(y, p),
    "averaged, all": lambda y, p, w, added: sg.compute_average_loss(
        ops.square(y - p), w[:, None], global_batch_size=_BATCH_SIZE
    ),
    "averaged, flat": lambda y, p, w, added: sg.compute_average_loss(
        ops.reshape(ops.square(y - p), (-1,))
    ),
    "penalty": lambda y, p, w, added: sg.compute_average_loss(_squares(y, p)) + sum(added),
    "scaled penalty": lambda y, p, w, added: (
        _MSE()(y, p) + sg.scale_regularization_loss(sum(added))
    ),
    "scaled penalties": lambda y, p, w, added: (
        sg.compute_average_loss(_squares(y, p)) + sg.nn.scale_regularization_loss(added)
    ),
    "activity": lambda y, p, w, added: sum(added),
    "scaled activity": lambda y, p, w, added: sg.scale_regularization_loss(added),
    "added": lambda y, p, w, added: sum(added),
    "added, batch size": lambda y, p, w, added: sum(added),
    "added loss": lambda y, p, w, added: sum(added),
    "added loss, weights": lambda y, p, w, added: sum(added),
}
# Sums over rows by hand, and shares of a sum over replicas. Padding would count.
_SUMS: dict[str, Callable[..., Any]] = {
    "own sum": lambda y, p, w, added: 0.1 * _summed(y, p),
    "own sum by batch size": lambda y, p, w, added: _summed(y, p) / 12,
    "own sum, weights": lambda y, p, w, added: ops.sum(_squares(y, p) * w) / 12,
    "own share": lambda y, p, w, added: _summed(y, p) / _num_rows(y),
    "own share, weights": lambda y, p, w, added: (
        ops.sum(_squares(y, p) * w) / sg.get_replica_context().all_reduce("sum", ops.sum(w))
    ),
}
_MEANS: dict[str, Callable[..., Any]] = {
    "own mean": lambda y, p, w, added: ops.mean(_squares(y, p)),
    "own mean, weights": lambda y, p, w, added: ops.mean(_squares(y, p) * w),
    "own sum by rows": lambda y, p, w, added: _summed(y, p) / ops.shape(y)[0],
}


def _num_rows(y: Any) -> int:
    rows = sg.get_replica_context().global_num_examples
    return len(y) if rows is None else rows


# As a loop must write it: parts of a sum over replicas.
_IN_LOOP = [name for name in _IN_CODE if name.startswith(("averaged", "sum", "scaled penalties"))]


_WAYS = _IN_CODE | _SUMS | _MEANS


class _Adds(keras.layers.Dense):
    """Adds a loss of its outputs to the losses of the model, as an endpoint layer of Keras does."""

    def call(self, inputs: Any, training: Any = None) -> Any:
        outputs = super().call(inputs)
        if "loss" in self.name:
            reduction = (
                "mean_with_sample_weight" if "weights" in self.name else "sum_over_batch_size"
            )
            counts = ops.cast(inputs[:, 2] > 0, "float32") if "weights" in self.name else None
            self.add_loss(_MSE(reduction)(inputs[:, :2], outputs, sample_weight=counts))
            return outputs
        size = _BATCH_SIZE if "size" in self.name else None
        self.add_loss(sg.compute_average_loss(ops.sum(outputs**2, axis=-1), None, size))
        return outputs


def _layer(name: str) -> keras.layers.Layer:
    kind = _Adds if "added" in name else keras.layers.Dense
    position = [*_IN_CODE, *_COMPILED, *_SUMS, *_MEANS].index(name)
    return kind(
        2,
        kernel_initializer=keras.initializers.Constant(0.1 + 0.03 * position),
        kernel_regularizer=keras.regularizers.L2(0.3) if "penalt" in name else None,
        activity_regularizer=keras.regularizers.L2(0.3) if "activity" in name else None,
        name=name.replace(",", "").replace(" ", "_"),
    )


class _Ways(keras.Model):
    """One layer for each way; `fit` trains them with the losses given to `compile`."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.names = names
        self.ways = [_layer(name) for name in names]
        self.total = keras.metrics.Mean(name="total")
        for layer in self.ways:
            layer.build((None, 3))
        self.built = True

    def call(self, x: Any) -> Any:
        # Without it, plain Keras may drop a loss whose id is that of one of an earlier trace.
        self._clear_losses()
        return [layer(x) for layer in self.ways]

    def losses_of(self, y: Any, outputs: Any, w: Any, added: list[Any]) -> dict[str, Any]:
        """The loss of each way; `added` are those of layers: first of activities, then weights."""
        in_order = sorted(_losses_added(self.names), key=lambda name: "penalt" in name)
        own = dict(zip(in_order, added, strict=True))
        return {
            name: _WAYS[name](y, p, w, [own[name]] if name in own else [])
            for name, p in zip(self.names, outputs, strict=True)
        }


def _losses_added(names: list[str]) -> list[str]:
    return [name for name in names if any(kind in name for kind in ("penalt", "activity", "added"))]


class _Step(_Ways):
    """Steps of its own, with the variables themselves."""

    def train_step(self, data: Any) -> Any:
        x, y, w = data

        def loss_fn() -> Any:
            losses = self.losses_of(y, self(x, training=True), w, self.losses)
            return sum(losses.values()), losses

        variables = self.trainable_variables
        (loss, losses), gradients = sg.value_and_grad(loss_fn, variables, has_aux=True)
        self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        self.total.update_state(loss)
        return {**losses, "total": self.total.result()}

    def test_step(self, data: Any) -> Any:
        x, y, w = data
        return self.losses_of(y, self(x, training=False), w, self.losses)


class _StatelessStep(_Ways):
    """Steps of its own in the form of Keras's trainer for JAX."""

    def _loss(self, trainable: Any, non_trainable: Any, x: Any, y: Any, w: Any) -> Any:
        outputs, non_trainable, added = self.stateless_call(
            trainable, non_trainable, x, return_losses=True
        )
        losses = self.losses_of(y, outputs, w, added)
        return sum(losses.values()), (losses, non_trainable)

    def train_step(self, state: Any, data: Any) -> Any:
        trainable, non_trainable, optimizer, metrics = state
        gradient = jax.value_and_grad(self._loss, has_aux=True)
        (loss, (losses, non_trainable)), grads = gradient(trainable, non_trainable, *data)
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, grads, trainable)
        others, own = metrics[:-2], metrics[-2:]
        own = self.total.stateless_update_state(own, loss)
        metrics = [*others, *own]
        logs = {**losses, "total": self.total.stateless_result(own)}
        return logs, (trainable, non_trainable, optimizer, metrics)

    def test_step(self, state: Any, data: Any) -> Any:
        trainable, non_trainable, metrics = state
        _, (losses, non_trainable) = self._loss(trainable, non_trainable, *data)
        return losses, (trainable, non_trainable, metrics)


class _ComputeLoss(_Ways):
    """Keras's steps with a loss of its own."""

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None
    ) -> Any:
        return sum(self.losses_of(y, y_pred, sample_weight, self.losses).values())


class _TwoOptimizers(_Step):
    """Two updates in one step, the second from the weights that the first one left."""

    def train_step(self, data: Any) -> Any:
        x, y, w = data
        logs = {}
        for part, optimizer in enumerate(self.optimizers):
            layers = self.ways[part::2]
            variables = [one for layer in layers for one in layer.trainable_variables]

            def loss_fn(part: int = part) -> Any:
                losses = self.losses_of(y, self(x, training=True), w, self.losses)
                others = list(losses.values())[1 - part :: 2]
                return sum(list(losses.values())[part::2]) + 0.0 * sum(others), losses

            (loss, losses), grads = sg.value_and_grad(loss_fn, variables, has_aux=True)
            optimizer.apply(grads, variables)
            logs |= {name: losses[name] for name in self.names[part::2]}
            self.total.update_state(loss)
        return {**logs, "total": 2 * self.total.result()}


_ENTRIES: dict[str, tuple[type[_Ways], list[str]]] = {
    "compile": (_Ways, [*_COMPILED, "activity", *(name for name in _IN_CODE if "added" in name)]),
    "train_step": (_Step, list(_IN_CODE)),
    "stateless train_step": (_StatelessStep, list(_IN_CODE)),
    "compute_loss": (_ComputeLoss, list(_IN_CODE)),
    "two optimizers": (_TwoOptimizers, list(_IN_CODE)),
    "run": (_Step, _IN_LOOP),
}
_ENTRIES |= {
    f"{entry}, {ways}": (_ENTRIES[entry][0], list(of_ways))
    for entry in ("train_step", "stateless train_step", "compute_loss")
    for ways, of_ways in (("sums", _SUMS), ("means", _MEANS))
}


def job_of(
    entry: str, num_rows: int, batch_size: int, left_out: Collection[str] = ()
) -> Callable[[Scope], dict[str, Any]]:
    """Trains for two epochs and evaluates; returns logs and the weights of each way."""
    random = np.random.RandomState(5)
    x = random.standard_normal((num_rows, 3)).astype("float32")
    y = random.standard_normal((num_rows, 2)).astype("float32")
    w = random.uniform(0.2, 2.0, num_rows).astype("float32")
    kind, names = _ENTRIES[entry]
    names = [name for name in names if name not in left_out]

    def job(scope: Scope) -> dict[str, Any]:
        with scope():
            model = kind(names)
            optimizer = keras.optimizers.SGD(0.1, momentum=0.5)
            if entry == "two optimizers":
                other = keras.optimizers.SGD(0.1, momentum=0.5)
                model.optimizers = [optimizer, other]
                for part, one in enumerate(model.optimizers):
                    one.build([v for layer in model.ways[part::2] for v in layer.weights])
            if entry == "compile":
                losses = [_COMPILED[name][0] if name in _COMPILED else None for name in names]
                model.compile(optimizer, losses)
            else:
                model.compile(optimizer)
        return _trained(model, entry, x, y, w, batch_size)

    return job


def _trained(model: _Ways, entry: str, x: Any, y: Any, w: Any, batch_size: int) -> dict[str, Any]:
    measured: dict[str, Any] = {}
    arguments: dict[str, Any] = {"batch_size": batch_size, "verbose": 0}
    if entry == "run":
        _loop(model, x, y, w, batch_size)
    else:
        given: tuple[Any, ...] = (x, y)
        weights: Any = w
        if entry == "compile":
            given = (x, [y] * len(model.names))
            ones = np.ones_like(w)
            weights = [w if _COMPILED.get(name, (0, 0))[1] else ones for name in model.names]
        history = model.fit(*given, sample_weight=weights, shuffle=False, epochs=2, **arguments)
        measured |= {f"fit {name}": value for name, value in history.history.items()}
        logs = model.evaluate(*given, sample_weight=weights, return_dict=True, **arguments)
        measured |= {f"evaluate {name}": value for name, value in logs.items()}
    for name, layer in zip(model.names, model.ways, strict=True):
        measured |= {f"weights of {name!r}": np.asarray(layer.kernel.value)}
    return measured


def _loop(model: _Ways, x: Any, y: Any, w: Any, batch_size: int) -> None:
    """A loop over batches; without a strategy each is one step of one device."""
    strategy = model.distribute_strategy
    batches = [
        tuple(array[start : start + batch_size] for array in (x, y, w))
        for start in range(0, len(x), batch_size)
    ]
    for batch in strategy.distribute_dataset(batches * 2):
        strategy.run(lambda *data: model.train_step(data)["total"], args=batch)


_SERVER = "server and a worker of two devices"
_SERVERS_IN_STEP = "servers and two workers in step"
_Strategy = Callable[[], contextlib.AbstractContextManager[Any]]


def _of_kind(kind: str, num_replicas: int) -> _Strategy:
    devices = [f"cpu:{index}" for index in range(num_replicas)]
    return lambda: contextlib.nullcontext(KINDS[kind].make(devices))


@contextlib.contextmanager
def _servers(num_workers: int, devices: int, mode: UpdateMode | None) -> Iterator[Any]:
    options = {} if mode is None else {"mode": mode}
    with local_strategy(num_workers, devices_per_worker=devices, **options) as strategy:
        yield strategy


_STRATEGIES: dict[str, _Strategy] = {
    **{f"mirrored {count}": _of_kind("mirrored", count) for count in (1, 2, 3, 4)},
    "tpu 4": _of_kind("tpu_4", 4),
    "central 2": _of_kind("central", 2),
    "hybrid 3": _of_kind("hybrid", 3),
    "shared 2": _of_kind("shared", 2),
    "shared 4": _of_kind("shared", 4),
    "two devices a replica": _of_kind("2x2", 2),
    _SERVER: functools.partial(_servers, 1, 2, None),
    _SERVERS_IN_STEP: functools.partial(_servers, 2, 1, UpdateMode(2)),
}
# Even parts for each strategy; parts of 2, 2 and none or 2 and 1 of three replicas.
ROWS = {"even": (24, 12), "uneven": (10, 4), "few ways": (5, 5)}
_FEW = {
    "averaged",
    "averaged, batch size",
    "scaled penalty",
    "sum",
    "mean with weights",
    "added loss, weights",
}
# Of workers in step, losses that may compare rows, and sums divided by a sum of this worker alone:
# these get warnings, or are means of the worker's own rows.
_NO_MEAN_OF_ROWS = {
    name
    for name in {*_COMPILED, *_IN_CODE, *_SUMS}
    if any(kind in name for kind in ("pairs", "within", "that averages", "with batch", "share"))
}
_SERVERS = (_SERVER, _SERVERS_IN_STEP)
_OF_SERVERS = ("compile", "train_step", "train_step, sums", "compute_loss")
_QUICK = {
    ("compile", "mirrored 2", "few ways"),
    ("train_step", "mirrored 3", "few ways"),
    ("stateless train_step", "mirrored 2", "few ways"),
    ("compute_loss", "mirrored 2", "few ways"),
    ("train_step, sums", "mirrored 2", "even"),
}


def _rows() -> list[Any]:
    rows = []
    for row in itertools.product(_ENTRIES, _STRATEGIES, ROWS):
        entry, strategy, rows_of = row
        is_there = strategy not in _SERVERS or entry in _OF_SERVERS
        is_there &= _ENTRIES[entry][1][0] in _IN_CODE or rows_of == "even"
        if is_there and (rows_of != "few ways" or row in _QUICK):
            marks = () if row in _QUICK else pytest.mark.slow
            rows.append(pytest.param(*row, marks=marks))
    return rows


@functools.cache
def _of_one_device(entry: str, rows: str) -> dict[str, Any]:
    return plain_keras(job_of(entry, *ROWS[rows], _left_out("", rows)))


def _left_out(strategy: str, rows: str) -> set[str]:
    left_out = _NO_MEAN_OF_ROWS if strategy == _SERVERS_IN_STEP else set()
    return left_out | (set(_IN_CODE) - _FEW if rows == "few ways" else set())


def expected_of(entry: str, strategy: str, rows: str) -> dict[str, Any]:
    """Plain Keras on JAX has one form of `train_step`."""
    kind, _, ways = entry.partition(", ")
    if kind not in ("compile", "compute_loss"):
        kind = "stateless train_step"
    expected = _of_one_device(f"{kind}, {ways}" if ways else kind, rows)
    if entry != "run" and strategy not in _SERVERS:
        return expected
    names = _ENTRIES[entry][1]  # logs under servers are those of one worker
    if strategy == _SERVERS_IN_STEP:
        names = [name for name in names if name not in _NO_MEAN_OF_ROWS]
    return {(key := f"weights of {name!r}"): expected[key] for name in names}


@pytest.mark.parametrize(("entry", "strategy", "rows"), _rows())
def test_numbers_are_those_of_one_device(entry: str, strategy: str, rows: str) -> None:
    with _STRATEGIES[strategy]() as made:
        job = job_of(entry, *ROWS[rows], _left_out(strategy, rows))
        measured = carried_out(job, made.scope)
    expected = expected_of(entry, strategy, rows)
    if strategy in _SERVERS:
        measured = {key: measured[key] for key in expected}
    assert differences(measured, expected) == []
