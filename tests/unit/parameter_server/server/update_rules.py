"""A rule of updates that needs no Keras: momentum, with a counter."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from stratagem.parameter_server.server.shards import Slot, State


@dataclasses.dataclass(frozen=True)
class Momentum:
    """v = 0.5 v + g; w = w - 0.1 v."""

    name: str = "momentum"

    def describe(self) -> dict[str, Any]:
        return {"name": self.name}

    def scalars(self) -> dict[str, np.ndarray]:
        return {"count": np.zeros((), np.int64)}

    def slots(self, name: str, shape: tuple[int, ...], dtype: str) -> list[Slot]:
        return [Slot("v", dtype, 0.0)]

    def apply(self, state: State, grads: Mapping[str, np.ndarray]) -> State:
        slots = {
            name: {"v": 0.5 * state.slots[name]["v"] + gradient} for name, gradient in grads.items()
        }
        values = {name: state.values[name] - 0.1 * slots[name]["v"] for name in grads}
        return State({"count": state.scalars["count"] + 1}, values, slots)


class Slow(Momentum):
    """Takes long enough for another request to come."""

    def apply(self, state: State, grads: Mapping[str, np.ndarray]) -> State:
        time.sleep(0.2)
        return super().apply(state, grads)


def num_discarded(client: Any) -> int:
    """Pushes that servers have discarded, in all."""
    return sum(state["num_discarded"] for state in client.describe().values())
