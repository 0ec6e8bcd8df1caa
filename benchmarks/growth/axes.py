"""The quantities that grow, and their sizes."""

from __future__ import annotations

import dataclasses

__all__ = ["AXES", "COSTS", "Axis"]

# Names of the costs in answers of `growing_steps`, with their titles.
COSTS = {
    "trace_s": "trace of the first call",
    "compile_s": "compilation",
    "call_s": "later call",
}


@dataclasses.dataclass(frozen=True)
class Axis:
    """A quantity that grows while all others stay.

    Args:
        name: "variables" or "replicas".
        sizes: in ascending order.
        quick_sizes: to see that it runs.
    """

    name: str
    sizes: tuple[int, ...]
    quick_sizes: tuple[int, ...]

    def question(self, size: int) -> dict[str, int]:
        """Returns the options of the worker."""
        if self.name == "variables":
            return {"num_variables": size, "num_replicas": 1}
        return {"num_variables": 10, "num_replicas": size}


AXES = (
    Axis("variables", (10, 100, 1000, 2500, 5000), (10, 20)),
    Axis("replicas", (1, 2, 4, 8, 16, 32, 64), (1, 2)),
)
