"""`fit` with callbacks beside `fit` without."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.cases import Case, Environments, Place, Side, jax_side
from benchmarks.workloads import WORKLOADS

__all__ = ["make_cases"]

_KINDS = {
    "batches": "a callback on every batch",
    "usual": "progress bar, early stopping, TensorBoard",
}


def make_cases(places: Sequence[Place], environments: Environments) -> list[Case]:
    """Returns a case for each kind of callbacks, place and number of steps a call of the MLP."""
    return [
        Case(
            name=f"{WORKLOADS['mlp'].title}, {place}, {steps} a call, {title}",
            ours=_side("with callbacks", place, steps, kind),
            references=(_side("fit without callbacks", place, steps, ""),),
            is_main=place.num_devices == 1,
        )
        for place in places
        for steps in (WORKLOADS["mlp"].steps_per_call(place.platform), 1)
        for kind, title in _KINDS.items()
    ]


def _side(name: str, place: Place, steps: int, callbacks: str) -> Side:
    return jax_side(name, "stratagem_fit", "mlp", place, steps, callbacks=callbacks)
