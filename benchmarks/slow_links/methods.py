"""The ways of training that are compared, by name, and the models that are trained."""

from __future__ import annotations

import dataclasses

__all__ = ["METHODS", "TASKS", "Method", "TaskSize"]


@dataclasses.dataclass(frozen=True)
class Method:
    """A way of training.

    Args:
        name: in tables.
        kind: "lockstep", or the class of `sg.local_updates`.
        period: steps from one synchronization to the next.
        compression: as for `sg.CommunicationOptions`; None for whole numbers.
    """

    name: str
    kind: str = "lockstep"
    period: int = 1
    compression: str | None = None


METHODS = (
    Method("lockstep"),
    Method("bfloat16", compression="bfloat16"),
    Method("float16", compression="float16"),
    Method("int8", compression="int8"),
    Method("float8", compression="float8"),
    Method("PowerSGD", compression="power_sgd"),
    Method("top-k", compression="top_k"),
    Method("LocalSGD, H=8", "LocalSGD", 8),
    Method("DiLoCo, H=50", "DiLoCo", 50),
    Method("Streaming DiLoCo, H=50", "StreamingDiLoCo", 50, "float8"),
)


@dataclasses.dataclass(frozen=True)
class TaskSize:
    """How long a model is trained.

    Args:
        num_steps: in all.
        point_steps: from one validation to the next.
    """

    num_steps: int
    point_steps: int = 50


TASKS = {
    "transformer": TaskSize(500),
    "convolutional": TaskSize(400),
    "recommender": TaskSize(400),
}
