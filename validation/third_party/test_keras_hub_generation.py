"""KerasHub's decoders generate with weights where they are stored: tokens, memory, programs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import jax
import pytest

import stratagem as sg
from validation.third_party.comparison import Numbers, assert_like_plain_keras
from validation.third_party.programs.keras_hub_generation import PROGRAMS, compiled, generated
from validation.third_party.programs.keras_hub_layouts import layout_map

_STRATEGIES: dict[str, Callable[[str], Any]] = {
    "mirrored": lambda name: sg.MirroredStrategy(),
    "all": lambda name: sg.MirroredStrategy(shard_state="all"),
    "layouts": lambda name: sg.MirroredStrategy(layout_map=layout_map(name, (2, 4))),
    "both": lambda name: sg.MirroredStrategy(
        layout_map=layout_map(name, (2, 4)), shard_state="all"
    ),
}
_QUICK = {("llama", "all"), ("gemma", "both"), ("gemma, LoRA on int8", "all")}
_ROWS = [
    pytest.param(name, kind, marks=() if (name, kind) in _QUICK else pytest.mark.slow)
    for name in PROGRAMS
    for kind in _STRATEGIES
]


@pytest.mark.parametrize(("name", "kind"), _ROWS)
def test_tokens_equal_those_of_plain_keras(
    plain: Mapping[str, Numbers], name: str, kind: str
) -> None:
    strategy = _STRATEGIES[kind](name.partition(",")[0])
    assert_like_plain_keras(PROGRAMS[name], strategy, plain[name])


def _bytes_by_device() -> Counter[jax.Device]:
    sizes: Counter[jax.Device] = Counter()
    for array in jax.live_arrays():
        # To read `addressable_shards` would make arrays, too.
        size = math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
        sizes.update(dict.fromkeys(array.devices(), size))
    return sizes


def test_no_device_has_the_model_and_calls_compile_once() -> None:
    with sg.MirroredStrategy(shard_state="all").scope():
        model = compiled("llama")
    total = sum(variable.stored.nbytes for variable in model.variables)
    before, during = _bytes_by_device(), list[Counter[jax.Device]]()
    step = model.generate_step

    def measured_step(*args: Any) -> Any:
        during.append(_bytes_by_device())  # while it is traced, its arguments exist
        return step(*args)

    model.generate_step = measured_step
    generated(model)
    added = during[0] - before
    assert max(added.values(), default=0) < total / 10
    events: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, duration_secs, **_: events.append(event)
    )
    generated(model)
    assert not [event for event in events if "compile" in event]
