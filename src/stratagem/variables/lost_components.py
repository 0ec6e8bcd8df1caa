"""Components of an ON_READ variable after members of an elastic group were lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from stratagem.options import VariableAggregation

__all__ = ["components_of_members"]


def components_of_members(
    components: np.ndarray[Any, Any], aggregation: VariableAggregation, kept: Sequence[int]
) -> np.ndarray[Any, Any]:
    """Returns the components of the members that are left, of shape (len(kept), ...).

    The first also takes the sum of the lost ones with aggregation SUM, and the place of the first
    replica with ONLY_FIRST_REPLICA, so that the variable keeps its value.
    """
    rows = np.array(components[list(kept)])
    if aggregation is VariableAggregation.SUM and components.dtype != bool:
        lost = np.delete(components, list(kept), axis=0)
        rows[0] += lost.sum(0, dtype=components.dtype)
    elif aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
        rows[0] = components[0]
    return rows
