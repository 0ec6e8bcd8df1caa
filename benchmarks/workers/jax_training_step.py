"""One training step as a user of JAX writes it by hand: what Stratagem is measured against.

The MLP is plain JAX; the other models are Keras's, called without state, so that both sides have
the same layers to compute. Adam is Keras's formula.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.workers.protocol import WorkerOptions
from benchmarks.workloads import WORKLOADS, mlp_weights

__all__ = [
    "AXIS",
    "Devices",
    "Forward",
    "State",
    "TrainingStep",
    "adam",
    "make_devices",
    "mlp_forward",
]

AXIS = "replica"
_LEARNING_RATE, _BETA_1, _BETA_2, _EPSILON = 1e-3, 0.9, 0.999, 1e-7

# (trainable parameters, other state, inputs) -> (logits, other state)
Forward = Callable[[list[Any], list[Any], Any], tuple[Any, list[Any]]]


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
    def kind(self) -> str:
        return self.mesh.devices.flat[0].device_kind

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
    if options.platform == "cpu":
        # The size of XLA:CPU's thread pool must be in the environment already (see sides.py).
        assert options.num_devices == 1 or "NPROC" in os.environ
        jax.config.update("jax_num_cpu_devices", options.num_devices)
    devices = jax.devices(options.platform)[: options.num_devices]
    return Devices(Mesh(np.array(devices), (AXIS,)))


class TrainingStep:
    """The step of a workload for one replica.

    Args:
        name: of the workload.
        devices: those of all replicas.
    """

    def __init__(self, name: str, devices: Devices) -> None:
        self._forward, parameters, others = mlp_forward() if name == "mlp" else _keras_model(name)
        self._batch_size = WORKLOADS[name].batch_size
        self._devices = devices
        # Loops of convolutions are 30 times slower than the steps written out, on CPU only.
        self.unroll = devices.platform == "cpu" and name in ("cnn", "resnet50")
        zeros = [np.zeros(parameter.shape, np.float32) for parameter in parameters]
        self.first_state: State = devices.place(
            State(parameters, others, zeros, [zero.copy() for zero in zeros], np.int32(0))
        )

    def __call__(self, state: State, x: Any, y: Any) -> tuple[State, Any, Any]:
        """Returns the new state, this replica's sum of losses, and its right answers."""

        def loss_share(parameters: list[Any]) -> tuple[Any, Any]:
            logits, others = self._forward(parameters, state.others, x)
            logits = logits.astype(jnp.float32)
            log_probabilities = jax.nn.log_softmax(logits)
            loss_sum = -jnp.take_along_axis(log_probabilities, y[:, None], axis=1).sum()
            return loss_sum / self._batch_size, (loss_sum, logits, others)

        gradient = jax.grad(loss_share, has_aux=True)
        gradients, (loss_sum, logits, others) = gradient(state.parameters)
        if self._devices.count > 1:
            gradients = jax.lax.psum(gradients, AXIS)
        num_right = (jnp.argmax(logits, axis=1) == y).sum().astype(jnp.float32)
        return adam(state, gradients, others), loss_sum, num_right


def adam(
    state: State,
    gradients: list[Any],
    others: list[Any],
    learning_rate: float = _LEARNING_RATE,
) -> State:
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


def mlp_forward() -> tuple[Forward, list[Any], list[Any]]:
    """Returns the forward pass of the MLP in plain JAX, its first weights, and no other state."""

    def forward(parameters: list[Any], others: list[Any], x: Any) -> tuple[Any, list[Any]]:
        *hidden, last = zip(parameters[::2], parameters[1::2], strict=True)
        for kernel, bias in hidden:
            x = jax.nn.relu(x @ kernel + bias)
        return x @ last[0] + last[1], others

    return forward, mlp_weights(), []


def _keras_model(name: str) -> tuple[Forward, list[Any], list[Any]]:
    # Keras takes a second to load, and the MLP does without.
    from benchmarks.workers.keras_models import build_model

    model = build_model(name)

    def forward(parameters: list[Any], others: list[Any], x: Any) -> tuple[Any, list[Any]]:
        return model.stateless_call(parameters, others, x, training=True)

    parameters = [np.asarray(variable.value) for variable in model.trainable_variables]
    return forward, parameters, [np.asarray(v.value) for v in model.non_trainable_variables]
