"""The ways of training that are compared, and what is trained with them."""

from __future__ import annotations

import dataclasses

from benchmarks.slow_links.links import LINKS, Link

__all__ = ["METHODS", "TRIALS", "Method", "Trial"]


@dataclasses.dataclass(frozen=True)
class Method:
    """A way of training.

    Args:
        name: in tables.
        kind: "lockstep", or the class of `sg.local_updates`.
        period: steps from one synchronization to the next.
        compression: as for `sg.CommunicationOptions`; None for whole numbers.
        outer_momentum: of DiLoCo; None for its default.
    """

    name: str
    kind: str = "lockstep"
    period: int = 1
    compression: str | None = None
    outer_momentum: float | None = None


METHODS = (
    Method("lockstep"),
    Method("bfloat16", compression="bfloat16"),
    Method("float16", compression="float16"),
    Method("int8", compression="int8"),
    Method("float8", compression="float8"),
    Method("PowerSGD", compression="power_sgd"),
    Method("LocalSGD, H=8", "LocalSGD", 8),
    Method("DiLoCo, H=50", "DiLoCo", 50),
    Method("DiLoCo, H=50, momentum 0.5", "DiLoCo", 50, outer_momentum=0.5),
    Method("LocalSGD, H=50", "LocalSGD", 50),
    Method("Streaming DiLoCo, H=50", "StreamingDiLoCo", 50, "float8"),
)
_LOCKSTEP, _DILOCO = METHODS[0], METHODS[7]
# One of those that send shorter numbers.
_SENDING_LEAST = tuple(one for one in METHODS if one.period >= 50)
_ALIKE = ("bfloat16", "float16", "float8", "LocalSGD, H=50", "DiLoCo, H=50, momentum 0.5")
_DIFFERENT = tuple(one for one in METHODS if one.name not in _ALIKE)
_TWO_LINKS = (LINKS[0], LINKS[2])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """A model that all methods train for the same number of steps.

    Args:
        model: key of `benchmarks.slow_links.models.TASKS`.
        num_steps: in all.
        point_steps: from one validation to the next.
        links: the first is that of the training; on the others some steps are timed.
        methods: the first is lockstep.
        first_steps: what one worker trains alone before; all methods begin from its weights.
    """

    model: str
    num_steps: int
    first_steps: int = 0
    point_steps: int = 50
    links: tuple[Link, ...] = LINKS
    methods: tuple[Method, ...] = METHODS

    def brief(self) -> Trial:
        """Returns a few steps of two methods: to see that it runs."""
        return dataclasses.replace(
            self,
            num_steps=20,
            first_steps=min(self.first_steps, 20),
            point_steps=10,
            links=self.links[:2],
            methods=(_LOCKSTEP, _DILOCO),
        )


TRIALS = {
    "transformer": Trial(model="transformer", num_steps=500),
    "convolutional": Trial(
        model="convolutional", num_steps=300, links=_TWO_LINKS, methods=_DIFFERENT
    ),
    "recommender": Trial(model="recommender", num_steps=300, links=_TWO_LINKS, methods=_DIFFERENT),
    # As in the paper, whose workers begin from weights that have been trained before.
    "trained transformer": Trial(
        model="transformer",
        num_steps=500,
        first_steps=1500,
        links=_TWO_LINKS,
        methods=(_LOCKSTEP, *_SENDING_LEAST),
    ),
    # As a whole on the slow link, where lockstep takes half an hour.
    "long transformer": Trial(
        model="transformer",
        num_steps=1500,
        links=(LINKS[2],),
        methods=(_LOCKSTEP, *_SENDING_LEAST),
    ),
}
