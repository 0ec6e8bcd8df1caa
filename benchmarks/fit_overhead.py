"""`fit` beside a `lax.scan` loop by hand that keeps the same metrics."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.cases import Case, Environments, Place, jax_side
from benchmarks.workloads import WORKLOADS

__all__ = ["make_cases"]


def make_cases(places: Sequence[Place], environments: Environments) -> list[Case]:
    """Returns a case for each model, place and way to call; all run in our own environment."""
    cases: list[Case] = []
    for place in places:
        cases += [
            _case("mlp", place, _steps("mlp", place)),
            _case("mlp", place, 1),
            _case("cnn", place, _steps("cnn", place)),
            _case("transformer", place, _steps("transformer", place)),
        ]
        if place.platform == "gpu":
            cases += _resnet_cases(place)
    return cases


def _steps(workload: str, place: Place) -> int:
    return WORKLOADS[workload].steps_per_call(place.platform)


def _case(workload: str, place: Place, steps_per_call: int) -> Case:
    return Case(
        name=f"{WORKLOADS[workload].title}, {place}, {steps_per_call} a call",
        ours=jax_side("fit", "stratagem_fit", workload, place, steps_per_call),
        references=(jax_side("scan by hand", "jax_scan_loop", workload, place, steps_per_call),),
    )


def _resnet_cases(place: Place) -> list[Case]:
    """Images on the device, and images that come from the host as bytes."""
    workload, steps = "resnet50", _steps("resnet50", place)
    title = f"{WORKLOADS[workload].title}, {place}, {steps} a call"
    from_host = jax_side("scan by hand", "jax_scan_loop", workload, place, steps)
    resident = jax_side(
        "scan by hand, data on device",
        "jax_scan_loop",
        workload,
        place,
        steps,
        data_on_device=True,
    )
    ours_from_host = jax_side("fit", "stratagem_fit", workload, place, steps)
    ours_resident = jax_side("fit", "stratagem_fit", workload, place, steps, data_on_device=True)
    return [
        Case(name=f"{title}, on device", ours=ours_resident, references=(resident,)),
        Case(
            name=f"{title}, uint8 from host",
            ours=ours_from_host,
            references=(from_host, resident),
        ),
    ]
