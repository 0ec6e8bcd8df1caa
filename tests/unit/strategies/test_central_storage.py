"""CentralStorageStrategy: one copy of the variables, the same numbers as copies on all devices."""

from __future__ import annotations

import re
from typing import Any

import jax
import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.keras.training.model import lower_training_step
from tests.unit.strategies.decoders import decoder_strategy

TWO, HOST = ["cpu:0", "cpu:1"], "cpu:2"


def parameter_device_of(strategy: sg.Strategy) -> Any:
    with strategy.scope():
        (device,) = sg.Variable(1.0).value.devices()
    return device


def test_parameter_device_is_the_host_or_the_only_device() -> None:
    several = sg.CentralStorageStrategy(TWO)
    assert parameter_device_of(several) == jax.local_devices(backend="cpu")[0]
    assert parameter_device_of(sg.CentralStorageStrategy("cpu:3")).id == 3
    assert sg.CentralStorageStrategy().num_replicas_in_sync == jax.local_device_count()


def test_parameter_device_is_where_variables_live() -> None:
    extended = sg.CentralStorageStrategy(TWO, HOST).extended
    assert [device.id for device in extended.parameter_devices] == [2]
    assert [device.id for device in extended.worker_devices] == [0, 1]


def test_host_that_jax_leaves_out_is_reported(monkeypatch) -> None:
    devices = jax.devices()[:2]

    def without_host(**_: Any) -> Any:
        raise RuntimeError("Unknown backend: 'cpu' requested")

    monkeypatch.setattr(jax, "local_devices", without_host)
    with pytest.raises(ValueError, match="JAX was told to leave the host out: Unknown backend"):
        sg.CentralStorageStrategy(devices)


def test_wrong_devices_are_refused() -> None:
    with pytest.raises(ValueError, match=r"devices=\[\] is empty"):
        sg.CentralStorageStrategy([])
    with pytest.raises(ValueError, match="cpu:99"):
        sg.CentralStorageStrategy(["cpu:99"])
    with pytest.raises(ValueError, match="cpu:99"):
        sg.CentralStorageStrategy(TWO, "cpu:99")
    with pytest.raises(TypeError, match=r"compute_devices=3 is of type int"):
        sg.CentralStorageStrategy(3)  # pyright: ignore[reportArgumentType]


# Copies of sharded state, each shared by some of the replicas.

NAMES = [f"cpu:{index}" for index in range(8)]


def copies(data: int, shard: int) -> sg.MirroredStrategy:
    return decoder_strategy(data * shard, 1, "all", shard)


def test_each_copy_is_on_adjacent_replicas() -> None:
    with copies(2, 4).scope():
        weight = sg.Variable(np.arange(64 * 32, dtype="float32").reshape(64, 32))
    shards = {one.device.id: one for one in weight.stored.addressable_shards}
    assert [shards[index].data.shape for index in range(8)] == [(16, 32)] * 8
    for rank in range(4):
        np.testing.assert_array_equal(shards[rank].data, weight.numpy()[16 * rank :][:16])
        np.testing.assert_array_equal(shards[rank].data, shards[4 + rank].data)


@pytest.mark.parametrize(
    ("data", "shard", "shape", "part"),
    [
        (1, 4, (64, 32), (16, 32)),
        (4, 1, (64, 32), (64, 32)),
        (4, 2, (1026, 3), (513, 3)),  # divisible by the shards of one copy
    ],
)
def test_replicas_share_copies(data, shard, shape, part) -> None:
    with copies(data, shard).scope():
        weight = sg.Variable(np.ones(shape, "float32"))
    assert weight.stored.addressable_shards[0].data.shape == part


def test_only_sums_of_shards_cross_between_copies() -> None:
    with copies(2, 4).scope():
        model = keras.Sequential([keras.Input((512,)), keras.layers.Dense(256, use_bias=False)])
        model.compile("sgd", "mse")
    batch = np.ones((16, 512), "float32"), np.ones((16, 256), "float32")
    text = lower_training_step(model, batch).compile().as_text()
    within = "{{0,1,2,3},{4,5,6,7}}"
    assert _messages(text, "all-gather") == [("512,256", within)]
    assert _messages(text, "reduce-scatter") == [("128,256", within)]
    sums = [groups for size, groups in _messages(text, "all-reduce") if size == "128,256"]
    assert sums == ["{{0,4},{1,5},{2,6},{3,7}}"]
    assert "512,256" not in dict(_messages(text, "all-reduce"))


def _messages(text: str, kind: str) -> list[tuple[str, str]]:
    """Returns shapes and devices of the messages of a kind."""
    row = rf"f32\[([\d,]*)\]\S* {kind}\(.*?replica_groups=(\{{\{{.*?\}}\}}|mesh\[.*?\}}|\[\S*)"
    # JAX 0.12 names the axis of the mesh instead of the devices.
    axes = {"shard": "{{0,1,2,3},{4,5,6,7}}", "replica": "{{0,4},{1,5},{2,6},{3,7}}"}
    named = {f"mesh['replica'=2,'shard'=4] {{'{axis}'}}": ids for axis, ids in axes.items()}
    return [(shape, named.get(groups, groups)) for shape, groups in re.findall(row, text)]


def test_replica_functions_gather_and_sum_over_all_replicas() -> None:
    strategy = copies(2, 2)

    def step() -> Any:
        context: Any = sg.get_replica_context()
        rank = keras.ops.cast(context.replica_id_in_sync_group, "float32")
        return context.all_reduce("sum", rank + 1.0), context.all_gather(rank[None], 0)

    for run in (strategy.run, sg.function(strategy.run)):
        total, ranks = run(step)
        assert [float(one) for one in strategy.experimental_local_results(total)] == [10.0] * 4
        for one in strategy.experimental_local_results(ranks):
            np.testing.assert_array_equal(one, [0, 1, 2, 3])


@pytest.mark.parametrize("size", [3, 0, -2, 16, 2.0, "4"])
def test_size_that_does_not_divide_the_replicas_is_refused(size: Any) -> None:
    with pytest.raises(ValueError, match=r"shard_size=.* for 8 replicas.\n.*\[1, 2, 4, 8\]"):
        sg.MirroredStrategy(NAMES, shard_state="all", shard_size=size)
    with pytest.raises(ValueError, match="shard_size=4 was given, and nothing is sharded"):
        sg.MirroredStrategy(NAMES, shard_size=4)
