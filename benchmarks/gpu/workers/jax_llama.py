"""Reference: a Llama trained in JAX by hand: loss, AdamW and the scan; KerasHub has the layers.

The state is made on the device, and each call replaces it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu.models import GpuModel
from benchmarks.gpu.options import SideOptions
from benchmarks.gpu.workers.jax_device import count_compile_s, find_device, peak_bytes
from benchmarks.gpu.workers.keras_llama import build_llama
from benchmarks.gpu.workers.measurement import Training, measure
from benchmarks.workers.jax_training_step import State, adam

__all__ = ["prepare"]

_DECAY = 0.004  # Keras's


def prepare(options: SideOptions, model: GpuModel) -> Training:
    compile_s = count_compile_s()
    device = find_device(options.platform)
    with jax.default_device(device):
        network = build_llama(model, attention=options.attention)
        parameters = [one.value for one in network.trainable_variables]
        others = [one.value for one in network.non_trainable_variables]
        zeros = [jnp.zeros_like(one) for one in parameters]
        state = State(parameters, others, zeros, jax.tree.map(jnp.copy, zeros), jnp.int32(0))
    num_parameters = sum(one.size for one in parameters)
    del parameters, others, zeros
    program = _compile(network, model, options)
    calls = _calls(model, options, device)

    def first_call() -> float:
        nonlocal state
        state, losses = program(state, *calls[0])
        return float(losses.mean())

    def train(num_epochs: int) -> float:
        nonlocal state
        loss = np.nan
        for _ in range(num_epochs):
            epoch: list[Any] = []
            for tokens, labels in calls:
                state, losses = program(state, tokens, labels)
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


def _compile(network: Any, model: GpuModel, options: SideOptions) -> Callable[..., Any]:
    def gradient(
        parameters: list[Any], others: list[Any], batch: tuple[Any, Any]
    ) -> tuple[Any, list[Any], list[Any]]:
        """Returns the loss, the other state and the gradients of a batch."""
        tokens, labels = batch
        inputs = {"token_ids": tokens, "padding_mask": jnp.ones_like(tokens)}

        def loss_of(parameters: list[Any]) -> tuple[Any, list[Any]]:
            logits, after = network.stateless_call(parameters, others, inputs, training=True)
            log_probabilities = jax.nn.log_softmax(logits.astype(jnp.float32))
            chosen = jnp.take_along_axis(log_probabilities, labels[..., None], axis=-1)
            return -chosen.mean(), after

        (loss, after), gradients = jax.value_and_grad(loss_of, has_aux=True)(parameters)
        return loss, after, gradients

    def mean_gradient(state: State, batches: tuple[Any, Any]) -> tuple[Any, list[Any], list[Any]]:
        """Returns the losses of batches, the other state, and the mean of their gradients."""

        def add(sums: tuple[Any, Any], batch: tuple[Any, Any]) -> tuple[Any, Any]:
            others, totals = sums
            loss, others, gradients = gradient(state.parameters, others, batch)
            return (others, jax.tree.map(jnp.add, totals, gradients)), loss

        zeros = jax.tree.map(jnp.zeros_like, state.parameters)
        (others, totals), losses = jax.lax.scan(add, (state.others, zeros), batches)
        return losses, others, [one / options.accumulation for one in totals]

    def one(state: State, data: tuple[Any, Any]) -> tuple[State, Any]:
        if options.accumulation > 1:
            loss, others, gradients = mean_gradient(state, data)
        else:
            loss, others, gradients = gradient(state.parameters, state.others, data)
        decayed = [one * (1 - model.learning_rate * _DECAY) for one in state.parameters]
        state = state._replace(parameters=decayed)
        return adam(state, gradients, others, model.learning_rate), loss

    def many(state: State, tokens: Any, labels: Any) -> tuple[State, Any]:
        if options.steps_per_call == options.accumulation:
            return one(state, (tokens, labels))
        return jax.lax.scan(one, state, (tokens, labels))

    return jax.jit(many, donate_argnums=0)


def _calls(model: GpuModel, options: SideOptions, device: Any) -> list[Any]:
    """Returns tokens and labels of each call of an epoch, on the device."""
    num_updates = options.steps_per_call // options.accumulation
    loops = [count for count in (num_updates, options.accumulation) if count > 1]
    shape = (-1, *loops, model.batch_size)
    arrays = [array.reshape(*shape, array.shape[-1]) for array in model.arrays()]
    return [jax.device_put(call, device) for call in zip(*arrays, strict=True)]


if __name__ == "__main__":
    measure(prepare)
