"""Training as a user of JAX writes it by hand: what Stratagem is measured against.

The MLP is plain JAX; the other models are Keras's, called without state, so that both sides have
the same layers to compute. Adam is Keras's formula. `step` is called once a step, on a batch that
lies on the devices. `scan` is a loop over epochs with the metrics of `fit`: its batches come one by
one, as from any loader; those of a call are stacked and moved in one transfer. The devices compute
one call while the next is prepared, because nothing here waits for them before the epoch's metrics
are read.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.workers.jax_device import details_of, profile_of
from benchmarks.workers.protocol import Training, WorkerOptions, serve
from benchmarks.workloads import Array, Workload, mlp_weights, workload_of

AXIS = "replica"
_BETA_1, _BETA_2, _EPSILON, _DECAY = 0.9, 0.999, 1e-7, 0.004  # Keras's

# (trainable parameters, other state, inputs) -> (logits, other state)
Forward = Callable[[list[Any], list[Any], Any], tuple[Any, list[Any]]]


Batch = tuple[Any, Any]


class State(NamedTuple):
    """All that a step replaces."""

    parameters: list[Any]
    others: list[Any]
    momentums: list[Any]
    velocities: list[Any]
    iterations: Any


@dataclasses.dataclass(frozen=True)
class Devices:
    """A mesh with one axis, and the shardings on it."""

    mesh: Mesh

    @property
    def count(self) -> int:
        return self.mesh.size

    @property
    def platform(self) -> str:
        return self.mesh.devices.flat[0].platform

    def place(self, value: Any, *spec: str | None) -> Any:
        return jax.device_put(value, NamedSharding(self.mesh, PartitionSpec(*spec)))

    def compile(self, function: Any, in_specs: Any, out_specs: Any) -> Any:
        """Compiles for all devices; the first argument is donated."""
        if self.count > 1:
            function = jax.shard_map(
                function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
            )
        return jax.jit(function, donate_argnums=0)


def make_devices(options: WorkerOptions) -> Devices:
    if options.platform == "cpu" and options.num_devices > 1:
        # The size of XLA:CPU's thread pool must be in the environment already (see sides.py).
        assert "NPROC" in os.environ
        jax.config.update("jax_num_cpu_devices", options.num_devices)
    devices = jax.devices(options.platform)[: options.num_devices]
    return Devices(Mesh(np.array(devices), (AXIS,)))


class TrainingStep:
    """The step of a workload for one replica of the devices."""

    def __init__(self, workload: Workload, devices: Devices, options: WorkerOptions) -> None:
        self._forward, parameters, others = _forward_of(workload, options.attention)
        self._workload, self._devices, self._accumulation = workload, devices, options.accumulation
        per_example = workload.transformer.length if workload.predicts_next_token else 1
        self._num_labels = workload.batch_size * per_example
        # Loops of convolutions are 30 times slower than the steps written out, on CPU only.
        self.unroll = devices.platform == "cpu" and workload.kind in ("cnn", "resnet50")
        self.num_trained = sum(one.size for one in parameters)

        def zeros() -> list[Any]:
            return [jnp.zeros(parameter.shape, jnp.float32) for parameter in parameters]

        first = State(parameters, others, zeros(), zeros(), np.int32(0))
        self.first_state: State = devices.place(first)

    def __call__(self, state: State, x: Any, y: Any) -> tuple[State, Any]:
        """Returns the new state, and this replica's sums of losses and right answers."""
        compute = self._mean_gradient if self._accumulation > 1 else self._gradient
        gradients, (sums, others) = compute(state, state.others, x, y)
        if self._devices.count > 1:
            gradients = jax.lax.psum(gradients, AXIS)
        rate = self._workload.learning_rate
        if self._workload.kind == "llama":  # AdamW
            decayed = [one * (1 - rate * _DECAY) for one in state.parameters]
            state = state._replace(parameters=decayed)
        return _adam(state, gradients, others, rate), sums

    def _gradient(self, state: State, others: list[Any], x: Any, y: Any) -> Any:
        def loss_share(parameters: list[Any]) -> tuple[Any, Any]:
            logits, after = self._forward(parameters, others, x)
            logits = logits.astype(jnp.float32)
            log_probabilities = jax.nn.log_softmax(logits)
            loss_sum = -jnp.take_along_axis(log_probabilities, y[..., None], axis=-1).sum()
            num_right = 0.0
            if self._workload.has_metrics:
                num_right = (jnp.argmax(logits, axis=-1) == y).sum().astype(jnp.float32)
            return loss_sum / self._num_labels, (jnp.stack([loss_sum, num_right]), after)

        return jax.grad(loss_share, has_aux=True)(state.parameters)

    def _mean_gradient(self, state: State, others: list[Any], x: Any, y: Any) -> Any:
        """Adds the gradients of several batches, one after the other."""

        def add(carry: tuple[Any, Any], batch: Batch) -> tuple[Any, Any]:
            others, totals = carry
            gradients, (sums, others) = self._gradient(state, others, *batch)
            return (others, jax.tree.map(jnp.add, totals, gradients)), sums

        zeros = jax.tree.map(jnp.zeros_like, state.parameters)
        (others, totals), sums = jax.lax.scan(add, (others, zeros), (x, y))
        return [one / self._accumulation for one in totals], (sums.sum(axis=0), others)


def _adam(state: State, gradients: list[Any], others: list[Any], learning_rate: float) -> State:
    """Returns the state after an update by Keras's formula of Adam."""
    step = (state.iterations + 1).astype(jnp.float32)
    rate = learning_rate * jnp.sqrt(1 - _BETA_2**step) / (1 - _BETA_1**step)
    momentums = [
        momentum + (gradient - momentum) * (1 - _BETA_1)
        for momentum, gradient in zip(state.momentums, gradients, strict=True)
    ]
    velocities = [
        velocity + (jnp.square(gradient) - velocity) * (1 - _BETA_2)
        for velocity, gradient in zip(state.velocities, gradients, strict=True)
    ]
    parameters = [
        parameter - momentum * rate / (jnp.sqrt(velocity) + _EPSILON)
        for parameter, momentum, velocity in zip(
            state.parameters, momentums, velocities, strict=True
        )
    ]
    return State(parameters, others, momentums, velocities, state.iterations + 1)


def _forward_of(workload: Workload, attention: str) -> tuple[Forward, list[Any], list[Any]]:
    """Returns the forward pass, the first weights, and the other state."""
    if workload.kind == "mlp":

        def forward(parameters: list[Any], others: list[Any], x: Any) -> tuple[Any, list[Any]]:
            *hidden, last = zip(parameters[::2], parameters[1::2], strict=True)
            for kernel, bias in hidden:
                x = jax.nn.relu(x @ kernel + bias)
            return x @ last[0] + last[1], others

        return forward, mlp_weights(), []

    # Keras takes a second to load, and the MLP does without.
    from benchmarks.workers.keras_models import build_model

    model = build_model(workload, attention=attention)

    def call(parameters: list[Any], others: list[Any], x: Any) -> tuple[Any, list[Any]]:
        if workload.kind == "llama":
            x = {"token_ids": x, "padding_mask": jnp.ones_like(x)}
        return model.stateless_call(parameters, others, x, training=True)

    parameters = [variable.value for variable in model.trainable_variables]
    return call, parameters, [variable.value for variable in model.non_trainable_variables]


def prepare(options: WorkerOptions, workload: Workload | None = None) -> Training:
    workload = workload or workload_of(options)
    details = details_of(options.platform)
    devices = make_devices(options)
    step = TrainingStep(workload, devices, options)
    run_epochs = (_steps if options.kind == "step" else _scan)(step, workload, devices, options)
    return Training(
        run_epochs,
        workload.steps_per_epoch,
        details=lambda: {**details(), "num_parameters": step.num_trained},
        profile=functools.partial(profile_of, run_epochs),
    )


def _steps(
    step: TrainingStep, workload: Workload, devices: Devices, options: WorkerOptions
) -> Callable[[int], float]:
    def train_step(state: State, x: Any, y: Any) -> tuple[State, Any]:
        state, sums = step(state, x, y)
        return state, sums[:1] / workload.batch_size

    copied, split = PartitionSpec(), PartitionSpec(AXIS)
    program = devices.compile(train_step, (copied, split, split), (copied, split))
    x, y = (devices.place(array, AXIS) for array in workload.batch())
    state = step.first_state

    def run_epochs(num_epochs: int) -> float:
        nonlocal state
        for _ in range(num_epochs * workload.steps_per_epoch):
            state, losses = program(state, x, y)
        return float(losses.sum())

    return run_epochs


def _scan(
    step: TrainingStep, workload: Workload, devices: Devices, options: WorkerOptions
) -> Callable[[int], float]:
    program = _compile(step, devices, options)
    arrays = workload.arrays()
    resident = list(_calls(arrays, workload, devices, options)) if options.data_on_device else None
    state = step.first_state

    def run_epochs(num_epochs: int) -> float:
        nonlocal state
        loss = np.nan
        for _ in range(num_epochs):
            sums = devices.place(np.zeros((devices.count, 2), np.float32), AXIS)
            for x, y in resident or _calls(arrays, workload, devices, options):
                state, sums = program((state, sums), x, y)
            loss, _accuracy = np.asarray(sums).sum(axis=0) / arrays[1].size
        return float(loss)

    return run_epochs


def _compile(step: TrainingStep, devices: Devices, options: WorkerOptions) -> Any:
    """Many steps, with the sums of losses and right answers of each replica kept beside."""

    def one(carry: tuple[State, Any], batch: Batch) -> tuple[tuple[State, Any], None]:
        state, sums = carry
        state, more = step(state, *batch)
        return (state, sums + more), None

    def many(carry: tuple[State, Any], x: Any, y: Any) -> tuple[State, Any]:
        if options.steps_per_call == options.accumulation:
            return one(carry, (x, y))[0]
        return jax.lax.scan(one, carry, (x, y), unroll=step.unroll)[0]

    is_single = options.steps_per_call == 1
    batches = PartitionSpec(AXIS) if is_single else PartitionSpec(None, AXIS)
    carry = (PartitionSpec(), PartitionSpec(AXIS))
    return devices.compile(many, (carry, batches, batches), carry)


def _calls(
    arrays: tuple[Array, Array], workload: Workload, devices: Devices, options: WorkerOptions
) -> Iterator[Batch]:
    """Puts the data of one call after the other on its way to the devices."""
    size, num_steps = workload.batch_size, options.steps_per_call
    loops = (num_steps // options.accumulation, options.accumulation)
    for first in range(0, len(arrays[0]), size * num_steps):
        batches = [
            [array[begin : begin + size] for array in arrays]
            for begin in range(first, first + size * num_steps, size)
        ]
        if num_steps == 1:
            yield tuple(devices.place(array, AXIS) for array in batches[0])
            continue
        stacked = [np.stack(parts) for parts in zip(*batches, strict=True)]
        if min(loops) > 1:
            stacked = [array.reshape(*loops, *array.shape[1:]) for array in stacked]
        yield tuple(devices.place(array, None, AXIS) for array in stacked)


if __name__ == "__main__":
    serve(prepare)
