"""Everything that a user can define, in one program, which runs as a script, module or notebook.

Prints by kind what one device computes, workers, a scheduled function, and another process.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import stratagem as sg  # isort: skip
import keras
import numpy as np
from keras import layers, ops

X = np.arange(24, dtype="float32").reshape(8, 3) / 10
Y = np.arange(8, dtype="float32")[:, None] / 8
SCALE = 3.0


class Initial(keras.initializers.Initializer):
    def __init__(self, step: float) -> None:
        self.step = step

    def __call__(self, shape: Any, dtype: Any = None) -> Any:
        values = ops.arange(int(np.prod(shape)), dtype="float32")
        return ops.reshape(self.step * values - 1.0, shape)


class Squares(keras.regularizers.Regularizer):
    def __init__(self, rate: float) -> None:
        self.rate = rate

    def __call__(self, x: Any) -> Any:
        return self.rate * ops.sum(ops.square(x))


class Scaled(layers.Layer):
    def __init__(self, factor: float = 2.0, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.factor = factor

    def build(self, shape: Any) -> None:
        arguments: Any = {"initializer": Initial(0.1), "regularizer": Squares(0.01)}
        self.kernel = self.add_weight(shape=(shape[-1], 4), name="kernel", **arguments)

    def call(self, x: Any) -> Any:
        return self.factor * ops.matmul(x, self.kernel)


def softer(x: Any) -> Any:
    return ops.tanh(x) * SCALE


class Bounded(keras.constraints.Constraint):
    def __init__(self, limit: float) -> None:
        self.limit = limit

    def __call__(self, value: Any) -> Any:
        return ops.minimum(value, self.limit)


class Subclassed(keras.Model):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.parts = [Scaled(factor), layers.Dense(1, softer, kernel_initializer="ones")]

    def call(self, x: Any) -> Any:
        for part in self.parts:
            x = part(x)
        return x


class WithStep(keras.Model):
    def train_step(self, data: Any) -> Any:
        x, y = data
        loss, grads = sg.value_and_grad(
            lambda: self.compute_loss(x, y, self(x, training=True)), self.trainable_variables
        )
        self.optimizer.apply(grads, self.trainable_variables)
        return {"loss": loss}


class Powers(keras.losses.Loss):
    def __init__(self, power: float) -> None:
        super().__init__()
        self.power = power

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return ops.mean(ops.abs(y_true - y_pred) ** self.power, axis=-1)


def scaled_error(y_true: Any, y_pred: Any) -> Any:
    return ops.mean(ops.abs(y_true - y_pred), axis=-1) * SCALE


class Rows(keras.metrics.Metric):
    def __init__(self, step: float, name: str = "rows") -> None:
        super().__init__(name=name)
        self.step = step
        self.count = self.add_weight(shape=(), initializer="zeros", name="count")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.count.assign_add(self.step * ops.sum(ops.ones_like(y_pred)))

    def result(self) -> Any:
        return self.count + 0.0


class Signs(keras.optimizers.SGD):
    def __init__(self, learning_rate: float, power: float = 1.0, **arguments: Any) -> None:
        super().__init__(learning_rate, **arguments)
        self.power = power

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        step = ops.sign(gradient) * ops.abs(gradient) ** self.power
        self.assign_sub(variable, ops.cast(learning_rate, variable.dtype) * step)


@keras.saving.register_keras_serializable("kinds")
class Falling(keras.optimizers.schedules.LearningRateSchedule):
    def __init__(self, peak: float) -> None:
        self.peak = peak

    def __call__(self, step: Any) -> Any:
        return self.peak / (1 + ops.cast(step, "float32"))

    def get_config(self) -> dict[str, Any]:
        return {"peak": self.peak}


class Unsaved(keras.optimizers.schedules.LearningRateSchedule):
    def __init__(self, peak: float) -> None:
        self.peak = peak

    def __call__(self, step: Any) -> Any:
        return self.peak / (2 + ops.cast(step, "float32"))


class Halving(keras.callbacks.Callback):
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.model.optimizer.learning_rate = float(self.model.optimizer.learning_rate) / 2


class Policy(keras.dtype_policies.DTypePolicy):
    """One of the user's."""


def small_rate() -> float:
    return 0.02


def dense(**arguments: Any) -> Any:
    arguments = {"kernel_initializer": "ones", **arguments}
    return keras.Sequential([keras.Input((3,)), layers.Dense(1, **arguments)])


def functional() -> Any:
    inputs = keras.Input((3,))
    return WithStep(inputs, layers.Dense(1, kernel_initializer="ones")(Scaled(1.5)(inputs)))


def of_submodels() -> Any:
    inner, inputs = functional(), keras.Input((3,))
    parts = [inner(inputs), inner(inputs * 2.0), Subclassed(2.0)(inputs)]
    return WithStep(inputs, layers.Add()(parts))


# By kind, how to make a model and what to compile it with.
KINDS: dict[str, Any] = {
    "metric": lambda: (dense(), {"metrics": [Rows(2.0)]}),
    "schedule": lambda: (dense(), {"optimizer": keras.optimizers.SGD(Falling(0.1))}),
    "optimizer": lambda: (dense(), {"optimizer": Signs(0.1, power=0.5)}),
    "activation": lambda: (dense(activation=softer), {}),
    "constraint": lambda: (dense(kernel_constraint=Bounded(0.9)), {}),
    "callback": lambda: (dense(), {"callbacks": [Halving()]}),
    "dtype policy": lambda: (dense(dtype=Policy("mixed_bfloat16")), {}),
    "functional model": lambda: (functional(), {}),
    "functional model of submodels": lambda: (of_submodels(), {}),
    "initializer": lambda: (dense(kernel_initializer=Initial(0.3)), {}),
    "layer": lambda: (keras.Sequential([Scaled(), layers.Dense(1)]), {}),
    "learning rate function": lambda: (dense(), {"optimizer": keras.optimizers.SGD(small_rate)}),
    "loss": lambda: (dense(), {"loss": Powers(2.5)}),
    "loss function": lambda: (dense(), {"loss": scaled_error}),
    "metric function": lambda: (dense(), {"metrics": [scaled_error]}),
    "regularizer": lambda: (dense(kernel_regularizer=Squares(0.2)), {}),
    "schedule without a config": lambda: (
        dense(),
        {"optimizer": keras.optimizers.SGD(Unsaved(0.1))},
    ),
    "subclassed model": lambda: (Subclassed(3.0), {}),
}


def trained(strategy: Any, kind: str) -> tuple[Any, list[Any]]:
    """Returns the model of a kind and the numbers of its training."""
    keras.backend.clear_session(free_memory=False)
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model, arguments = KINDS[kind]()
        callbacks = arguments.pop("callbacks", None)
        defaults = {"optimizer": "sgd", "loss": "mse", "metrics": ["mae"]}
        model.compile(**defaults | arguments)
    options: Any = {"batch_size": 3, "verbose": 0}
    history = model.fit(X, Y, epochs=2, shuffle=False, callbacks=callbacks, **options).history
    logs = model.evaluate(X, Y, return_dict=True, **options)
    values = [model.predict(X, **options).tolist(), *(one.tolist() for one in model.get_weights())]
    return model, [history, logs, values]


def on_one_device(kinds: list[str]) -> dict[str, list[Any]]:
    return {kind: trained(sg.OneDeviceStrategy("cpu:0"), kind)[1] for kind in kinds}


def predicted(model: Any, x: Any) -> Any:
    """Runs on a worker, which knows names that this process has registered."""
    name = keras.saving.get_registered_name(Falling)
    strategy = sg.get_strategy()
    return name, np.asarray(strategy.run(lambda: model(x))).tolist()


def on_servers(kinds: list[str]) -> dict[str, list[Any]]:
    numbers: dict[str, list[Any]] = {}
    with sg.ParameterServerStrategy(num_workers=1, num_servers=1) as strategy:
        coordinator = sg.coordinator.ClusterCoordinator(strategy)
        for kind in kinds:
            model, numbers[kind] = trained(strategy, kind)
            answer = coordinator.schedule(predicted, args=(model, X)).fetch()
            expected = numbers[kind][2][0]
            assert answer[0] == "kinds>Falling", answer
            np.testing.assert_allclose(answer[1], expected, rtol=1e-5, err_msg=kind)
    return numbers


def main(kinds: list[str]) -> None:
    kinds = kinds or [*KINDS]
    numbers = {"one device": on_one_device(kinds), "servers": on_servers(kinds)}
    numbers["another process"] = sg.launch.spawn(on_one_device, (kinds,), workers=1)[0]
    print(json.dumps(numbers))


if __name__ == "__main__":
    main(sys.argv[1:])
