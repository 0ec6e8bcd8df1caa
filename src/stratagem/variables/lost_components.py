"""Components of an ON_READ variable after the members of an elastic group have changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from stratagem.options import VariableAggregation
from stratagem.variables.aggregation import mean_of_components


def components_of_members(
    components: np.ndarray[Any, Any],
    aggregation: VariableAggregation,
    kept: Sequence[int | None],
) -> np.ndarray[Any, Any]:
    """Returns the components of the present members, of shape (len(kept), ...).

    `kept` has the row of each member in `components`, or None for one that has just joined. The
    variable keeps its value: with aggregation SUM, the first of those that were there takes the sum
    of the lost ones, and a new one adds nothing; with MEAN, a new one has the mean; with
    ONLY_FIRST_REPLICA, the first member has the component of the first one before.
    """
    is_sum = aggregation is VariableAggregation.SUM
    present = [row for row in kept if row is not None]
    rows = np.zeros((len(kept), *components.shape[1:]), components.dtype)
    for place, row in enumerate(kept):
        if row is not None:
            rows[place] = components[row]
        elif aggregation is VariableAggregation.MEAN:
            rows[place] = mean_of_components(components[present])
        elif not is_sum:
            rows[place] = components[present[0]]
    if is_sum and components.dtype != bool:
        lost = np.delete(components, present, axis=0)
        rows[kept.index(present[0])] += lost.sum(0, dtype=components.dtype)
    elif aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
        rows[0] = components[0]
    return rows
