"""KerasRS's `DistributedEmbedding` with tables on parameter servers equals plain Keras."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

import stratagem as sg
from tests.unit.parameter_server.clusters import local_strategy
from validation.third_party.comparison import Numbers, assert_like_plain_keras
from validation.third_party.programs.keras_rs_servers import PROGRAMS


@pytest.mark.parametrize("name", PROGRAMS)
def test_tables_on_two_servers(plain: Mapping[str, Numbers], name: str) -> None:
    """With one worker: several take a batch each, and so train with other batches."""
    split = sg.partitioners.FixedShardsPartitioner(2)
    with local_strategy(1, variable_partitioner=split) as strategy:
        assert_like_plain_keras(PROGRAMS[name], strategy, plain[name])


@pytest.mark.parametrize("name", PROGRAMS)
def test_devices_in_lockstep_with_a_table_on_servers(
    plain: Mapping[str, Numbers], name: str
) -> None:
    with sg.HybridStrategy(["cpu:0", "cpu:1"], placement={"films": "server"}) as strategy:
        assert_like_plain_keras(PROGRAMS[name], strategy, plain[name])
