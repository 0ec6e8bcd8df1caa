"""Components of ON_READ variables in an elastic group: each member keeps those of all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stratagem.devices.collectives.elastic_rounds import Rounds
from stratagem.execution.programs.destination import Destination


def is_component(place: Destination) -> bool:
    """Returns True for an ON_READ variable, and False for a carry of `run_steps`."""
    return bool(place.spec) and hasattr(place.variable, "whole")


def components_of_all(own: Sequence[Any], rounds: Rounds, count: int) -> list[jax.Array]:
    """Returns the components of all `count` members, who keep what one loses. Call in a step."""
    gathered: dict[int, jax.Array] = {}
    for dtype in dict.fromkeys(value.dtype for value in own):  # few messages
        places = [place for place, value in enumerate(own) if value.dtype == dtype]
        rows = rounds.gather(jnp.concatenate([own[place].ravel() for place in places]), count)
        ends = np.cumsum([own[place].size for place in places])[:-1]
        for place, part in zip(places, jnp.split(rows, ends, axis=1), strict=True):
            gathered[place] = part.reshape((count, *own[place].shape[1:]))
    return [gathered[place] for place in range(len(own))]


def held_components(variables: Sequence[Any]) -> list[Any]:
    """Returns the components of all members as of the last step, None where others came since."""
    wholes = [(one.whole, one.stored) for one in variables]
    return [whole.gathered if whole.storage is stored else None for whole, stored in wholes]


def hold_components(variables: Sequence[Any], components: Sequence[Any]) -> None:
    """Keeps the components of all members with each variable."""
    for variable, gathered in zip(variables, components, strict=True):
        if gathered is not None:
            variable.whole.hold(variable.stored, gathered)


def merged_components(
    new: Sequence[Any], before: Sequence[Any], replicas: Sequence[int]
) -> list[Any]:
    """Returns the components of all: new ones of the participants, old ones of the others."""
    merged: list[Any] = []
    for one, old in zip(new, before, strict=True):
        rows = np.array(old)
        rows[list(replicas)] = np.asarray(one)[list(replicas)]
        merged.append(jnp.asarray(rows))
    return merged
