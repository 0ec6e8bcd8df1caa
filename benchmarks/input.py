"""Loops fed from the host, beside the same step on data that is on the device already.

The ratio is the share of the time in which the device is busy. On CPU the step stands in for an
accelerator: it takes as long as one of Grain's workers needs to decode its batch, and leaves the
cores to the host. On a GPU ResNet-50 trains on pixels from host memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.cases import Case, Environments, Place, Side, jax_side
from benchmarks.encoded_images import decoding_s
from benchmarks.workloads import WORKLOADS

__all__ = ["make_cases"]

_IMAGES, _PIXELS = "encoded_images", "resnet50"


def make_cases(places: Sequence[Place], environments: Environments) -> list[Case]:
    """Returns a case for each place."""
    return [
        _encoded_images(place) if place.platform == "cpu" else _pixels(place) for place in places
    ]


def _encoded_images(place: Place) -> Case:
    workload = WORKLOADS[_IMAGES]
    image_s = decoding_s()
    step_s = round(image_s * workload.batch_size, 4)

    def side(name: str, module: str, **options: object) -> Side:
        return jax_side(name, module, _IMAGES, place, step_s=step_s, **options)

    times = f"{1e3 * image_s:.1f} ms each, {1e3 * step_s:.0f} ms a step"
    return Case(
        name=f"{workload.title}, {times}, {place}",
        ours=side("loop", "stratagem_input"),
        references=(
            side("step alone", "stratagem_input", data_on_device=True),
            side("input alone", "grain_alone"),
            side("loop by hand", "grain_loop"),
        ),
        is_main=place.num_devices == 1,
    )


def _pixels(place: Place) -> Case:
    return Case(
        name=f"{WORKLOADS[_PIXELS].title}, uint8 from host, {place}",
        ours=jax_side("loop", "stratagem_input", _PIXELS, place),
        references=(
            jax_side("data on device", "stratagem_input", _PIXELS, place, data_on_device=True),
        ),
    )
