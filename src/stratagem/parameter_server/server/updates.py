"""Update rules: optimizers that clients send to servers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from stratagem.errors import explain

# Rounds of local updates: settings that workers and servers share, and the count of steps.


@dataclasses.dataclass(frozen=True)
class LocalRounds:
    """Settings of training between synchronizations, and of the servers' update.

    Args:
        period: number of steps of a round.
        num_workers: number of workers whose changes are averaged.
        num_pushes: number of pushes in which the servers receive the changes of all workers: 1 if
            they wait for all and average them, or else the number of workers.
        warmup_steps: number of first steps that are each a round.
        learning_rate: factor of an averaged change.
        momentum: Nesterov momentum of the outer optimizer; None for no such optimizer.
    """

    period: int
    num_workers: int
    num_pushes: int
    warmup_steps: int = 0
    learning_rate: float = 1.0
    momentum: float | None = None


class RoundCounter:
    """Counts the steps of a worker, to find the last one of each round."""

    def __init__(self, rounds: LocalRounds) -> None:
        self._rounds = rounds
        self._num_steps = 0
        self._position = 0

    def step(self) -> bool:
        """Counts a step; returns True if it is the last one of its round."""
        self._num_steps += 1
        self._position += 1
        is_end = self._num_steps <= self._rounds.warmup_steps
        if self._position == self._rounds.period:
            is_end, self._position = True, 0
        return is_end

    def restart(self) -> None:
        """Begins a whole round with the next step."""
        self._position = 0


@dataclasses.dataclass(frozen=True)
class Slot:
    """Optimizer state of a variable, with the variable's shape.

    Args:
        name: unique among the variable's slots.
        dtype: dtype name.
        initial: initial value of each element.
    """

    name: str
    dtype: str
    initial: float


@dataclasses.dataclass(frozen=True)
class State:
    """State that a rule updates.

    Args:
        scalars: state shared by all variables, such as the step count, by name.
        values: variable values, by variable name.
        slots: slots by variable name, then by slot name.
        rows: names of the values that are some rows of a table, padded with zeros.
    """

    scalars: Mapping[str, np.ndarray]
    values: Mapping[str, np.ndarray]
    slots: Mapping[str, Mapping[str, np.ndarray]]
    rows: Sequence[str] = ()


class UpdateRule(Protocol):
    """An optimizer as servers see it. It must treat all rows alike, to support row updates."""

    def scalars(self) -> dict[str, np.ndarray]:
        """Returns the initial scalars shared by all variables."""
        ...

    def slots(self, name: str, shape: tuple[int, ...], dtype: str) -> list[Slot]:
        """Returns the slots of a variable or of its shard."""
        ...

    def apply(self, state: State, grads: Mapping[str, np.ndarray]) -> State:
        """Returns the state after one update; does not modify or alias its inputs.

        `state` holds only variables that have gradients: all rows or some. `grads` has the same
        names and shapes as the values. Its memory is reused after the call.
        """
        ...

    def describe(self) -> dict[str, Any]:
        """Returns a JSON-serializable description; different rules return different ones."""
        ...


@dataclasses.dataclass(frozen=True)
class UpdateMode:
    """Synchronous or asynchronous updates, the staleness limit, and the kind of pushes.

    Args:
        num_needed: number of workers whose gradients are summed and applied at once; 0 applies each
            worker's gradients on arrival.
        max_staleness: discard gradients computed from values more than this many updates old; None
            for no limit. For asynchronous updates only: synchronous ones discard all stale
            gradients.
        rounds: settings of local updates, or their fields in a message: pushes have changes of
            weights, whose mean a synchronous update applies. None for gradients.

    Raises:
        ValueError: a negative number, or both are set.
    """

    num_needed: int = 0
    max_staleness: int | None = None
    rounds: LocalRounds | None = None

    def __post_init__(self) -> None:
        fields: Any = self.rounds
        if isinstance(fields, Mapping):
            object.__setattr__(self, "rounds", LocalRounds(**fields))
        if self.num_needed < 0 or (self.max_staleness or 0) < 0:
            raise ValueError(
                explain(
                    f"{self} has a negative number.",
                    expected="num_needed and max_staleness to be 0 or more.",
                    fix="omit num_needed for asynchronous updates, and max_staleness to accept "
                    "gradients of any age.",
                )
            )
        if self.num_needed and self.max_staleness is not None:
            raise ValueError(
                explain(
                    f"{self} limits the staleness of synchronous updates.",
                    expected="max_staleness only with num_needed=0.",
                    fix="omit max_staleness: synchronous updates discard all stale gradients.",
                )
            )


ASYNCHRONOUS = UpdateMode()


@dataclasses.dataclass(frozen=True)
class Pushed:
    """Result of a gradient push.

    Args:
        is_used: False if every server discarded its part as stale. A worker then recomputes the
            gradients from new values, or continues with its next batch.
        num_discarded: number of servers that discarded their part.
        version: smallest version among the servers in the request.
        values: requested whole variables right after the update, by name; read-only.
    """

    is_used: bool
    num_discarded: int
    version: int
    values: Mapping[str, np.ndarray]


def stored_name(optimizer: str, name: str) -> str:
    """Returns the full name of an optimizer's slot or scalar.

    Neither part may contain a dot. `optimizer` is "" if there is only one.
    """
    return f"{optimizer}.{name}" if optimizer else name


def own_name(optimizer: str, name: str) -> str:
    """Returns the optimizer's own name for a slot or scalar: the inverse of `stored_name`."""
    return name[len(optimizer) + 1 :] if optimizer else name


def is_stored_by(optimizer: str, name: str) -> bool:
    """Returns True if a `stored_name` belongs to an optimizer."""
    return name.rpartition(".")[0] == optimizer


# Update rule of servers under local updates: applies changes of weights that workers made.
#
# Asynchronous changes arrive one by one, computed from weights of different ages. Momentum would be
# multiplied by each of them, so it is updated and applied once for as many pushes as there are
# workers. If all of these began with the same weights, the result is that of one synchronous
# update.
#
# Source: Liu et al., Asynchronous local-SGD training for language modeling, 2024, delayed Nesterov
# update with c = 0; Douillard et al., DiLoCo, 2023.

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
