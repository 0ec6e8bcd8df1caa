"""Reference: training in JAX by hand, a step a call or many in a scan.

The MLP is plain JAX; the others are Keras's models, called without state, so that both sides
compute the same layers. Adam is Keras's formula.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu.models import GpuModel
from benchmarks.gpu.options import SideOptions
from benchmarks.gpu.workers.jax_device import count_compile_s, find_device, peak_bytes
from benchmarks.gpu.workers.measurement import Training, measure
from benchmarks.workers.jax_training_step import Forward, State, adam, mlp_forward

__all__ = ["prepare"]


def prepare(options: SideOptions, model: GpuModel) -> Training:
    compile_s = count_compile_s()
    device = find_device(options.platform)
    forward, parameters, others = mlp_forward() if model.kind == "mlp" else _keras_forward(model)
    zeros = [np.zeros(one.shape, np.float32) for one in parameters]
    first = State(parameters, others, zeros, [zero.copy() for zero in zeros], np.int32(0))
    state: State = jax.device_put(first, device)
    num_parameters = sum(one.size for one in parameters)
    del first, parameters, others, zeros
    program = _compile(forward, model, options.steps_per_call)
    arrays = model.arrays()

    def calls() -> Iterator[Any]:
        return _calls(arrays, model.batch_size, options.steps_per_call, device)

    resident = list(calls()) if options.data == "device" else None

    def first_call() -> float:
        nonlocal state
        x, y = next(calls())
        state, losses = program(state, x, y)
        return float(losses.mean())

    def train(num_epochs: int) -> float:
        nonlocal state
        loss = np.nan
        for _ in range(num_epochs):
            epoch: list[Any] = []
            for x, y in resident or calls():
                state, losses = program(state, x, y)
                epoch.append(losses)
            loss = np.mean([np.asarray(one) for one in epoch])
        return float(loss)

    return Training(
        first_call=first_call,
        train=train,
        device_kind=device.device_kind,
        num_parameters=num_parameters,
        peak_bytes=lambda: peak_bytes(device),
        compile_s=compile_s,
    )


def _compile(forward: Forward, model: GpuModel, steps_per_call: int) -> Callable[..., Any]:
    def one(state: State, batch: tuple[Any, Any]) -> tuple[State, Any]:
        x, y = batch

        def loss_of(parameters: list[Any]) -> tuple[Any, list[Any]]:
            logits, others = forward(parameters, state.others, x)
            log_probabilities = jax.nn.log_softmax(logits.astype(jnp.float32))
            chosen = jnp.take_along_axis(log_probabilities, y[..., None], axis=-1)
            return -chosen.mean(), others

        (loss, others), gradients = jax.value_and_grad(loss_of, has_aux=True)(state.parameters)
        return adam(state, gradients, others, model.learning_rate), loss

    def many(state: State, x: Any, y: Any) -> tuple[State, Any]:
        return one(state, (x, y)) if steps_per_call == 1 else jax.lax.scan(one, state, (x, y))

    return jax.jit(many, donate_argnums=0)


def _calls(
    arrays: tuple[Any, Any], batch_size: int, steps_per_call: int, device: Any
) -> Iterator[Any]:
    """Puts the data of one call after the other on its way to the device."""
    size = batch_size * steps_per_call
    for begin in range(0, len(arrays[1]), size):
        parts = [array[begin : begin + size] for array in arrays]
        if steps_per_call > 1:
            parts = [part.reshape(steps_per_call, batch_size, *part.shape[1:]) for part in parts]
        yield jax.device_put(parts, device)


def _keras_forward(model: GpuModel) -> tuple[Forward, list[Any], list[Any]]:
    # Keras takes a second to load, and the MLP does without.
    from benchmarks.gpu.workers.keras_networks import build_model

    network = build_model(model)

    def forward(parameters: list[Any], others: list[Any], x: Any) -> tuple[Any, list[Any]]:
        return network.stateless_call(parameters, others, x, training=True)

    parameters = [np.asarray(one.value) for one in network.trainable_variables]
    return forward, parameters, [np.asarray(one.value) for one in network.non_trainable_variables]


if __name__ == "__main__":
    measure(prepare)
