"""Exponents of costs: a cost of n ** e has the exponent e."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["MOST", "exponent"]

# n log n has an exponent of 1.15 from 100 to 10,000; beyond this, a cost needs an explanation.
MOST = 1.2
# A cost has a constant part, which small sizes show.
_NUM_LARGEST = 3


def exponent(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """Returns the slope of the logarithms over the largest sizes, by least squares.

    Args:
        sizes: in ascending order, at least two.
        costs: one for each size, positive.
    """
    if len(sizes) != len(costs) or len(sizes) < 2:
        raise ValueError(f"{len(sizes)} sizes and {len(costs)} costs: expected two or more of each")
    x = [math.log(size) for size in sizes[-_NUM_LARGEST:]]
    y = [math.log(cost) for cost in costs[-_NUM_LARGEST:]]
    mean_x, mean_y = math.fsum(x) / len(x), math.fsum(y) / len(y)
    above = math.fsum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return above / math.fsum((a - mean_x) ** 2 for a in x)
