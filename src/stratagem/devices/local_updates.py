"""Training with several local steps between synchronizations: the methods and their settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from stratagem.devices.compression import Compression, check_field, unexpected

__all__ = ["DiLoCo", "LocalSGD", "QuadraticPeriod", "StreamingDiLoCo"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuadraticPeriod:
    """A period that grows as the learning rate falls, with its inverse square.

    The period that begins at a step has `max(base, floor((growth / learning_rate)**2))` steps, with
    the learning rate of that step. All replicas compute it from the optimizer's learning rate, so
    that nothing is sent. At a rate of 0 it has no end: give `total_steps` if the rate falls to 0.

    For a learning rate that first rises, give the method as many `warmup_steps`.

    Args:
        base: the least period, at least 1.
        growth: growth coefficient, the paper's alpha, more than 0. The period starts to grow where
            the learning rate falls below `growth / sqrt(base)`.
        total_steps: number of steps of the training, after the last of which the replicas
            synchronize; None for no such step.

    Raises:
        TypeError: an argument of another type.
        ValueError: a number out of range.

    Example:
        >>> rule = sg.local_updates.QuadraticPeriod(base=4, growth=0.2, total_steps=10_000)
        >>> sg.local_updates.LocalSGD(period=rule).period.base  # 100 steps at a rate of 0.02
        4

    Source: Gu et al., A quadratic synchronization rule for distributed deep learning, 2024.
    """

    base: int
    growth: float
    total_steps: int | None = None

    def __post_init__(self) -> None:
        check_field(self, "base", int, least=1)
        check_field(self, "growth", int | float, most=1000.0)
        if self.growth == 0:
            raise ValueError(unexpected(self, "growth", "a number of more than 0"))
        if self.total_steps is not None:
            check_field(self, "total_steps", int, least=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalUpdates:
    """A method of training with local steps; base class of all of them.

    Each replica trains its own weights with its own optimizer state. Every `period` steps the
    replicas synchronize: their changes since the last time are averaged and applied to the global
    model, from which all of them go on. Metrics count the examples of all replicas.

    Args:
        period: number of steps from one synchronization to the next, at least 1, or the rule by
            which it grows. Where an optimizer accumulates gradients, steps are its updates.
        warmup_steps: number of first steps after each of which the replicas synchronize.
        compression: how changes are sent, as for `sg.CommunicationOptions`; None sends them whole.

    Raises:
        TypeError: an argument of another type.
        ValueError: a number out of range, or an unknown compression.

    Example:
        >>> isinstance(sg.local_updates.LocalSGD(period=4), sg.local_updates.LocalUpdates)
        True

    Source: Stich, Local SGD converges fast and communicates little, 2019.
    """

    period: int | QuadraticPeriod
    warmup_steps: int = 0
    compression: Compression | str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.period, QuadraticPeriod):
            check_field(self, "period", int, least=1)
        check_field(self, "warmup_steps", int, least=0)
        object.__setattr__(self, "compression", Compression.parse(self.compression))

    @property
    def least_period(self) -> int:
        """Number of steps of the shortest period."""
        return self.period if isinstance(self.period, int) else self.period.base

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of what the global model keeps for each variable."""
        return ()

    @property
    def num_fragments(self) -> int:
        """Number of parts of the model that are synchronized at different steps of a period."""
        return 1

    @property
    def overlap_steps(self) -> int:
        """Number of steps from sending changes to taking the new global weights."""
        return 0

    @property
    def mixing(self) -> float:
        """Part of its own weights that a replica keeps when it takes the global ones."""
        return 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalSGD(LocalUpdates):
    """Averages the weights of the replicas every `period` steps.

    Args:
        period: as for `LocalUpdates`.
        warmup_steps: as for `LocalUpdates`.
        compression: as for `LocalUpdates`.

    Raises:
        TypeError: an argument of another type.
        ValueError: a number out of range, or an unknown compression.

    Example:
        >>> sg.local_updates.LocalSGD().period
        8

    Source: Stich, Local SGD converges fast and communicates little, 2019; Lin et al., Don't use
    large mini-batches, use local SGD, 2020, for the first steps.
    """

    period: int | QuadraticPeriod = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiLoCo(LocalUpdates):
    """Applies the averaged change of the replicas' weights by an outer optimizer.

    The outer optimizer is SGD with Nesterov momentum; a change counts as its negative gradient. The
    inner optimizer is the model's own, any optimizer of Keras; the paper takes AdamW.

    Args:
        period: as for `LocalUpdates`.
        warmup_steps: as for `LocalUpdates`.
        compression: as for `LocalUpdates`.
        outer_learning_rate: learning rate of the outer optimizer, from 0 to 10.
        outer_momentum: momentum of the outer optimizer, from 0 to 1.

    Raises:
        TypeError: an argument of another type.
        ValueError: a number out of range, or an unknown compression.

    Example:
        >>> method = sg.local_updates.DiLoCo(period=50)
        >>> method.outer_learning_rate, method.outer_momentum
        (0.7, 0.9)

    Source: Douillard et al., DiLoCo: Distributed low-communication training of language models,
    2023.
    """

    period: int | QuadraticPeriod = 500
    outer_learning_rate: float = 0.7
    outer_momentum: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        check_field(self, "outer_learning_rate", int | float, most=10.0)
        check_field(self, "outer_momentum", int | float, most=1.0)

    @property
    def state_names(self) -> tuple[str, ...]:
        """The momentum of the outer optimizer."""
        return ("outer_momentum",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamingDiLoCo(DiLoCo):
    """DiLoCo that sends the model in fragments, one after the other, and takes the results later.

    A fragment has every n-th layer. Each is sent once in a period, at a step of its own, so that
    a link is never asked for the whole model at once. A replica trains some steps on its own
    weights after a fragment was sent, and then mixes what came with what it has.

    Args:
        period: as for `LocalUpdates`.
        warmup_steps: as for `LocalUpdates`.
        compression: as for `LocalUpdates`.
        outer_learning_rate: as for `DiLoCo`.
        outer_momentum: as for `DiLoCo`.
        fragments: number of fragments, at least 1; at most one for each layer is made.
        overlap: number of steps from sending a fragment to mixing it in, less than the period.
        own_share: part of its own weights that a replica keeps in the mixture, the paper's alpha.

    Raises:
        TypeError: an argument of another type.
        ValueError: a number out of range, or an unknown compression.

    Example:
        >>> method = sg.local_updates.StreamingDiLoCo(fragments=4, compression="float8")
        >>> method.period, method.num_fragments, method.mixing
        (100, 4, 0.5)

    Source: Douillard et al., Streaming DiLoCo with overlapping communication, 2025.
    """

    period: int | QuadraticPeriod = 100
    fragments: int = 3
    overlap: int = 1
    own_share: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.period, int):
            raise TypeError(
                unexpected(self, "period", "an integer: fragments are sent at fixed steps of it")
            )
        check_field(self, "fragments", int, least=1)
        check_field(self, "overlap", int, least=0)
        check_field(self, "own_share", int | float, most=1.0)
        if self.overlap >= self.period:
            raise ValueError(unexpected(self, "overlap", f"less than period={self.period}"))

    @property
    def num_fragments(self) -> int:
        """The number of fragments."""
        return self.fragments

    @property
    def overlap_steps(self) -> int:
        """The steps from sending a fragment to mixing it in."""
        return self.overlap

    @property
    def mixing(self) -> float:
        """The part of its own weights that a replica keeps."""
        return self.own_share


def fragments_of(trained: Sequence[Any], method: LocalUpdates) -> list[tuple[list[Any], int]]:
    """Returns the variables that are sent together, and the step of a period when they are.

    A fragment has every n-th layer, so that it is spread over the depth of the model.
    """
    layers = list(dict.fromkeys(one.path.rpartition("/")[0] for one in trained))
    count = max(1, min(method.num_fragments, len(layers)))
    places = {layer: place % count for place, layer in enumerate(layers)}
    members: list[list[Any]] = [[] for _ in range(count)]
    for one in trained:
        members[places[one.path.rpartition("/")[0]]].append(one)
    period = method.period if isinstance(method.period, int) else 0  # of a rule: one fragment
    return [(each, place * period // count) for place, each in enumerate(members) if each]


@dataclasses.dataclass(frozen=True)
class Islands:
    """Groups of consecutive replicas that train in lockstep. Between them links are slow.

    Args:
        num_replicas: number of replicas.
        size: replicas of an island, a divisor of their number.
    """

    num_replicas: int
    size: int

    @property
    def count(self) -> int:
        """Number of islands."""
        return self.num_replicas // self.size

    @property
    def members(self) -> tuple[tuple[int, ...], ...]:
        """Replicas of each island."""
        return tuple(
            tuple(range(first, first + self.size))
            for first in range(0, self.num_replicas, self.size)
        )

    @property
    def peers(self) -> tuple[tuple[int, ...], ...]:
        """Replicas of the same place in their islands, for each place."""
        return tuple(zip(*self.members, strict=True))
