"""Update rule of servers under local updates: applies changes of weights that workers made.

Asynchronous changes arrive one by one, computed from weights of different ages. Momentum would be
multiplied by each of them, so it is updated and applied once for as many pushes as there are
workers. If all of these began with the same weights, the result is that of one synchronous update.

Source: Liu et al., Asynchronous local-SGD training for language modeling, 2024, delayed Nesterov
update with c = 0; Douillard et al., DiLoCo, 2023.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from stratagem.parameter_server.server.local_rounds import LocalRounds
from stratagem.parameter_server.server.updates import Slot, State

_MOMENTUM, _SUM, _COUNT = "outer_momentum", "outer_sum", "num_pushes"


@dataclasses.dataclass(frozen=True)
class OuterUpdate:
    """Adds changes of weights, as gradients, to the global model."""

    rounds: LocalRounds

    def describe(self) -> dict[str, Any]:
        """Returns the settings that change the update."""
        rounds = self.rounds
        return {
            "outer_learning_rate": rounds.learning_rate,
            "outer_momentum": rounds.momentum,
            "num_pushes": rounds.num_pushes,
        }

    def scalars(self) -> dict[str, np.ndarray]:
        """Returns the number of pushes since the last update of the momentum."""
        return {} if self.rounds.momentum is None else {_COUNT: np.zeros((), np.int64)}

    def slots(self, name: str, shape: tuple[int, ...], dtype: str) -> list[Slot]:
        """Returns the momentum, and the sum of the changes since it was updated."""
        if self.rounds.momentum is None:
            return []
        wide = str(np.promote_types(np.dtype(dtype), np.float32))
        slots = [Slot(_MOMENTUM, wide, 0.0)]
        return slots if self.rounds.num_pushes == 1 else [*slots, Slot(_SUM, wide, 0.0)]

    def apply(self, state: State, grads: Mapping[str, np.ndarray]) -> State:
        """Returns the state after one push of changes, or one synchronous update with their mean.

        The changes of `num_pushes` pushes together are one step of the outer optimizer.
        """
        rounds, momentum = self.rounds, self.rounds.momentum
        if momentum is None:
            values = {
                name: _added(state.values[name], rounds.learning_rate, change / rounds.num_pushes)
                for name, change in grads.items()
            }
            return State({}, values, {name: {} for name in grads})
        count = int(state.scalars[_COUNT]) + 1
        is_last = count == rounds.num_pushes
        values: dict[str, np.ndarray] = {}
        slots: dict[str, dict[str, np.ndarray]] = {}
        for name, change in grads.items():
            own = {key: np.asarray(value) for key, value in state.slots[name].items()}
            step = change.astype(own[_MOMENTUM].dtype) / rounds.num_pushes
            total = own[_SUM] + step if _SUM in own else step
            if is_last:
                own[_MOMENTUM] = momentum * own[_MOMENTUM] + total
                step = momentum * own[_MOMENTUM] + step
                total = np.zeros_like(total)
            if _SUM in own:
                own[_SUM] = total
            values[name] = _added(state.values[name], rounds.learning_rate, step)
            slots[name] = {
                key: np.array(value, np.dtype(state.slots[name][key].dtype))
                for key, value in own.items()
            }
        return State({_COUNT: np.asarray(0 if is_last else count, np.int64)}, values, slots)


def outer_name(optimizer: str) -> str:
    """Returns the name on the servers of the outer optimizer that belongs to an optimizer."""
    return f"outer_{optimizer}"


def _added(value: np.ndarray, rate: float, step: np.ndarray) -> np.ndarray:
    value = np.asarray(value)
    return (value.astype(step.dtype) + rate * step).astype(value.dtype)
