"""Where variables are put."""

from __future__ import annotations

import numpy as np
import pytest

import stratagem as sg
from stratagem.parameter_server.client.shard_layout import ShardLayout, ShardPlacer


def test_variables_of_one_size_are_dealt_out_in_turn() -> None:
    placer = ShardPlacer(3)
    assert [placer.place(f"v{i}", (2, 2), "float32").servers for i in range(7)] == [
        (i % 3,) for i in range(7)
    ]


def test_kernels_of_an_mlp_do_not_all_go_to_one_server() -> None:
    placer = ShardPlacer(2)
    shapes = [(784, 256), (256,), (256, 128), (128,), (128, 10), (10,)]
    places = [placer.place(str(shape), shape, "float32") for shape in shapes]
    assert [place.servers[0] for place in places] == [0, 1, 1, 1, 1, 1]


def test_shards_are_dealt_out_and_cover_every_row() -> None:
    placer = ShardPlacer(2, sg.partitioners.FixedShardsPartitioner(5))
    place = placer.place("table", (13, 2), "float32", has_rows=True)
    assert place.rows == (3, 3, 3, 2, 2)
    assert place.first_rows == (0, 3, 6, 9, 11)
    assert place.servers == (0, 1, 0, 1, 1)
    assert [place.shape_of(shard) for shard in range(5)] == [(n, 2) for n in place.rows]
    value = np.arange(26).reshape(13, 2)
    np.testing.assert_array_equal(np.concatenate(place.parts(value)), value)


def test_shard_is_placed_as_a_variable_of_its_own() -> None:
    placer = ShardPlacer(2, sg.partitioners.FixedShardsPartitioner(3))
    place = placer.place("table", (8, 2), "float32", has_rows=True)
    assert [place.name_of(shard) for shard in range(3)] == [f"table/part_{i}" for i in range(3)]
    assert place.shard(1) == ShardLayout(
        "table/part_1", (3, 2), "float32", (place.servers[1],), (3,), has_rows=True
    )
    assert place.shard(2).name_of(0) == "table/part_2"


@pytest.mark.parametrize("shape", [(), (0,), (0, 4)])
def test_scalars_and_empty_variables_have_one_place(shape) -> None:
    place = ShardPlacer(2, sg.partitioners.FixedShardsPartitioner(5)).place("v", shape, "int64")
    assert len(place.servers) == 1
    assert place.shape_of(0) == shape
    assert place.dtype == "int64"
