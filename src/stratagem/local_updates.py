"""Training with several local steps between synchronizations: the methods and their settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from stratagem.compression import Compression
from stratagem.messages import explain

__all__ = ["DiLoCo", "LocalSGD", "LocalUpdates", "StreamingDiLoCo"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalUpdates:
    """A method of training with local steps; base class of all of them.

    Each replica trains its own weights with its own optimizer state. Every `period` steps the
    replicas synchronize: their changes since the last time are averaged and applied to the global
    model, from which all of them go on. Metrics count the examples of all replicas.

    Args:
        period: number of steps from one synchronization to the next, at least 1.
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

    period: int
    warmup_steps: int = 0
    compression: Compression | str | None = None

    def __post_init__(self) -> None:
        self._check_count("period", 1)
        self._check_count("warmup_steps", 0)
        object.__setattr__(self, "compression", Compression.parse(self.compression))

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

    def _check_count(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(self._unexpected(name, f"an integer of at least {least}"))
        if value < least:
            raise ValueError(self._unexpected(name, f"an integer of at least {least}"))

    def _check_number(self, name: str, most: float) -> None:
        value = getattr(self, name)
        expected = f"a number from 0 to {most:g}"
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(self._unexpected(name, expected))
        if not 0 <= value <= most:
            raise ValueError(self._unexpected(name, expected))

    def _unexpected(self, name: str, expected: str) -> str:
        return explain(
            f"{type(self).__name__} received {name}={getattr(self, name)!r}.",
            expected=f"{expected}.",
            fix=f"pass another {name}.",
        )


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

    period: int = 8


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

    period: int = 500
    outer_learning_rate: float = 0.7
    outer_momentum: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_number("outer_learning_rate", 10.0)
        self._check_number("outer_momentum", 1.0)

    @property
    def state_names(self) -> tuple[str, ...]:
        """The momentum of the outer optimizer."""
        return ("outer_momentum",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamingDiLoCo(DiLoCo):
    """DiLoCo that sends the model in fragments, one after the other, and takes the results later.

    A fragment has every n-th layer. Each is sent once in a period, at a step of its own, so that
    a link is never asked for the whole model at once. A replica keeps training while a fragment
    is under way, and then mixes what comes with what it has.

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

    period: int = 100
    fragments: int = 3
    overlap: int = 1
    own_share: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_count("fragments", 1)
        self._check_count("overlap", 0)
        self._check_number("own_share", 1.0)
        if self.overlap >= self.period:
            raise ValueError(self._unexpected("overlap", f"less than period={self.period}"))

    @property
    def num_fragments(self) -> int:
        """The number of fragments."""
        return self.fragments

    @property
    def overlap_steps(self) -> int:
        """The steps that a fragment is under way."""
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
    return [(each, place * method.period // count) for place, each in enumerate(members) if each]
