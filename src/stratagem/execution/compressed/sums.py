"""The compressed sum of gradients: errors added before, and kept after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from stratagem.devices.compression import Compression, PowerSGD, TopK
from stratagem.execution.compressed.numbers import sums_of_numbers
from stratagem.execution.compressed.power_sgd import power_sgd_sums
from stratagem.execution.compressed.top_k import top_k_sums

if TYPE_CHECKING:
    from stratagem.execution.communicator import Communicator


State = Mapping[str, jax.Array]


def compressed_sums(
    setting: Compression,
    gradients: Sequence[jax.Array],
    states: Sequence[State],
    communicator: Communicator,
    *,
    replica_id: Any,
    step: Any,
) -> tuple[list[jax.Array], list[State]]:
    """Returns the sums of gradients over replicas, and the next state of each.

    Args:
        setting: how the gradients are sent.
        gradients: this replica's, at least one.
        states: of each gradient the arrays that `setting.state_shapes` names, as float32. "error"
            is this replica's own, "factor" is equal on all.
        communicator: of this replica.
        replica_id: of this replica.
        step: number of the step; stochastic rounding follows from it and the replica.

    Returns:
        Sums, in the dtypes of the gradients and bitwise equal on all replicas, and states.
    """
    whole = [gradient.astype(jnp.float32) for gradient in gradients]
    if setting.error_feedback:
        whole = [one + state["error"] for one, state in zip(whole, states, strict=True)]
    factors: Sequence[jax.Array | None] = [None] * len(whole)
    if isinstance(setting, PowerSGD):
        given = [state["factor"] for state in states]
        sums, errors, factors = power_sgd_sums(whole, given, communicator)
    elif isinstance(setting, TopK):
        sums, errors = top_k_sums(setting, whole, communicator)
    else:
        key = jax.random.fold_in(
            jax.random.fold_in(jax.random.key(0, impl="rbg"), step), replica_id
        )
        sums, errors = sums_of_numbers(setting, whole, communicator, replica_id=replica_id, key=key)
    new_states: list[State] = []
    for error, factor in zip(errors, factors, strict=True):
        state = {"error": error} if setting.error_feedback else {}
        new_states.append(state if factor is None else {**state, "factor": factor})
    return [one.astype(like.dtype) for one, like in zip(sums, gradients, strict=True)], new_states
