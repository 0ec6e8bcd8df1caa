"""Rounds of local updates: the steps from one synchronization to the next.

A round of a fixed period ends at a multiple of it. The end of a round of `QuadraticPeriod` is a
variable of the optimizer, set when the round begins and equal on all replicas.
"""

from __future__ import annotations

import weakref
from typing import Any, cast

import jax.numpy as jnp
import keras
from jax.typing import ArrayLike

from stratagem.devices.local_updates import LocalUpdates, QuadraticPeriod

# The longest round: a float32 has it exactly, and a sum with a step is an int32.
_MOST_STEPS = 1_000_000_000
# A quotient of rates such as 0.2 / 0.1 in float32 may be a little less than the whole number.
_ROUNDING = 1 + 1e-5

# The variable with the last step of the current round, by optimizer.
_ends: weakref.WeakKeyDictionary[Any, keras.Variable] = weakref.WeakKeyDictionary()


def add_round_end(optimizer: keras.optimizers.Optimizer, method: LocalUpdates) -> None:
    """Creates the variable with the end of the current round, if a rule decides it."""
    if isinstance(method.period, QuadraticPeriod) and optimizer not in _ends:
        made: Any = optimizer.add_variable((), initializer="zeros", dtype="int32", name="round_end")
        _ends[optimizer] = made


def begin_round(optimizer: keras.optimizers.Optimizer, method: LocalUpdates) -> None:
    """Sets the end of a round that begins with this step. Call before the optimizer's update."""
    if not isinstance(method.period, QuadraticPeriod):
        return
    end: Any = _ends[optimizer]
    start = cast("Any", optimizer.iterations).value
    rate: Any = keras.ops.convert_to_tensor(optimizer.learning_rate)
    found = _end_of_round(method.period, start, rate, method.warmup_steps)
    end.assign(jnp.where(start >= end.value, found, end.value))


def _end_of_round(rule: QuadraticPeriod, start: Any, rate: ArrayLike, warmup_steps: int) -> Any:
    ratio = rule.growth / jnp.asarray(rate, jnp.float32)
    wanted = jnp.floor(ratio * ratio * _ROUNDING)
    steps = jnp.clip(wanted, rule.base, _MOST_STEPS).astype(jnp.int32)
    steps = jnp.where(start < warmup_steps, 1, steps)
    end = start + steps
    if rule.total_steps is None:
        return end
    return jnp.where(start < rule.total_steps, jnp.minimum(end, rule.total_steps), end)


class SyncRounds:
    """The rounds of one fragment of the model.

    Args:
        optimizer: the optimizer, after its update.
        method: the method.
        offset: steps by which rounds of a fixed period end later than at its multiples.
    """

    def __init__(
        self, optimizer: keras.optimizers.Optimizer, method: LocalUpdates, offset: int
    ) -> None:
        self._optimizer = optimizer
        self._method = method
        self._offset = offset

    def end_at(self, step: Any, late_steps: int = 0) -> Any:
        """Returns True, traced, if a round ended `late_steps` before a step, the current one."""
        if isinstance(self._method.period, QuadraticPeriod):
            return step == cast("Any", _ends[self._optimizer]).value
        return is_end_of_fixed_round(self._method, self._offset, step, late_steps)


def is_end_of_fixed_round(method: LocalUpdates, offset: int, step: Any, late_steps: int = 0) -> Any:
    """Returns True if a round of a fixed period ended `late_steps` before a step."""
    ended = step - late_steps
    is_end = ((ended - offset) % method.least_period == 0) & (ended >= 1)
    return is_end | (step <= method.warmup_steps)
