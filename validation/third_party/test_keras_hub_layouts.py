"""KerasHub's own layouts of Llama and Gemma, taken as they are: numbers and shards."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

import stratagem as sg
from validation.third_party.comparison import Numbers, assert_like_plain_keras
from validation.third_party.programs.keras_hub_layouts import PROGRAMS, layout_map, made


@pytest.mark.parametrize("shard_state", [pytest.param(None, marks=pytest.mark.slow), "all"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_model_under_its_own_layouts_equals_plain_keras(
    plain: Mapping[str, Numbers], name: str, shard_state: str | None
) -> None:
    """Two replicas, and two key heads over four devices of a replica."""
    strategy = sg.MirroredStrategy(layout_map=layout_map(name, (2, 4)), shard_state=shard_state)
    assert (strategy.num_replicas_in_sync, strategy.topology.num_logical_devices) == (2, 4)
    assert_like_plain_keras(PROGRAMS[name], strategy, plain[name])


@pytest.mark.parametrize("name", PROGRAMS)
def test_weights_and_slots_are_sharded_over_both_axes(name: str) -> None:
    strategy = sg.MirroredStrategy(layout_map=layout_map(name, (2, 4)))
    with strategy.scope():
        model = made(name, num_layers=1)
        model.optimizer.build(model.trainable_variables)
    large = [one for one in model.weights if one.ndim > 1 and "reverse" not in one.path]
    assert len(large) == 8
    for variable in large:
        parts = [shard.data.shape for shard in variable.stored.addressable_shards]
        # Gemma's layouts divide heads: pairs of four devices have copies of two key heads.
        count = 4 if variable.shape[0] == 2 else 8
        assert np.prod(variable.shape) == count * np.prod(parts[0]), variable.path
    for slot in model.optimizer.variables[2:]:
        assert slot.stored.sharding.spec == slot.slot_of.stored.sharding.spec


@pytest.mark.slow
def test_llama_with_sequences_in_parts_equals_plain_keras(plain: Mapping[str, Numbers]) -> None:
    """Padding, causal masks and rotary positions are those of the whole sequence."""
    devices = [f"cpu:{index}" for index in range(8)]
    strategy = sg.MirroredStrategy(devices, devices_per_replica=4, sequence_axis=1)
    assert_like_plain_keras(PROGRAMS["llama"], strategy, plain["llama"])
