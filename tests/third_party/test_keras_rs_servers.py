"""KerasRS's `DistributedEmbedding` with tables on parameter servers equals plain Keras."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

import stratagem as sg
from stratagem.parameter_server.server.updates import UpdateMode
from tests.parameter_server.clusters import local_strategy
from tests.third_party.comparison import Numbers, assert_like_plain_keras
from tests.third_party.programs.keras_rs_servers import PROGRAMS
from tests.third_party.programs.measuring import Measurements, Place

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


def _without_counts(numbers: Measurements) -> Measurements:
    """Leaves out the counter of the optimizer: each push of a worker is a step of its own."""
    return {key: value for key, value in numbers.items() if not key.endswith(" iteration")}


@pytest.mark.parametrize("name", PROGRAMS)
def test_two_workers_with_synchronous_updates(plain: Mapping[str, Numbers], name: str) -> None:
    def program(place: Place) -> Measurements:
        return _without_counts(PROGRAMS[name](place))

    split = sg.partitioners.FixedShardsPartitioner(2)
    with local_strategy(2, mode=UpdateMode(2), variable_partitioner=split) as strategy:
        assert_like_plain_keras(program, strategy, _without_counts(plain[name]))


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_devices_in_lockstep_with_a_table_on_servers(
    plain: Mapping[str, Numbers], name: str
) -> None:
    placement = {"films": "server"}
    with sg.HybridStrategy(["cpu:0", "cpu:1"], placement=placement) as strategy:
        assert_like_plain_keras(PROGRAMS[name], strategy, plain[name])
