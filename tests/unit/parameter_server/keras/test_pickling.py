"""What workers have of variables that are on servers."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from stratagem.parameter_server.client.shard_layout import ShardLayout
from stratagem.parameter_server.client.variable_client import Stored
from stratagem.parameter_server.cluster.remote_state_strategy import RemoteStateStrategy
from stratagem.parameter_server.keras.pickling import KerasPacking
from stratagem.parameter_server.strategy.process_parts import worker_parts
from tests.unit.parameter_server.clusters import local_strategy


@pytest.mark.compatibility
def test_worker_knows_a_table_that_it_has_no_room_for() -> None:
    shape = (10**12, 8)  # 32 TB
    with local_strategy(num_servers=1) as strategy:
        with strategy.scope():
            small = keras.Variable(np.zeros((3, 8), "float32"), name="table")
        packing = KerasPacking()
        kind, described, _, has_rows, _ = packing._name_of(small, strategy, set())
        placement = ShardLayout("large", shape, "float32", (0,), (shape[0],), has_rows=True)
        variables = strategy.placement.remote.variables
        worker = RemoteStateStrategy(worker_parts(variables.client, 0, variables.mode))
        name = (kind, {**described, "shape": shape}, Stored("large"), has_rows, placement)
        large = packing._object_of(name, worker)
    assert large.shape == shape
    assert large.place == Stored("large")
    assert packing._object_of(name, worker) is large
