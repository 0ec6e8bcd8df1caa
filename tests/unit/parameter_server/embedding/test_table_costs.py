"""Costs of tables, beside those that were measured."""

from __future__ import annotations

import pytest

import stratagem as sg
from stratagem.parameter_server.embedding.plan import moved_bytes, server_s

IdFrequencies = sg.embedding.IdFrequencies
TableCluster = sg.embedding.TableCluster
TableSize = sg.embedding.TableSize

# docs/design/measurements.md, "Placement": 1,024 examples of 8 ids in 400,000 rows of 64, on two
# devices. MB a step in programs, and to and from the third device; the rest of the model included.
_PLACED_MB = {"mirrored": (2.72, 0), "sharded": (4.85, 0), "central": (2.72, 2.10 + 2.16)}


def test_bytes_of_a_step_are_those_measured() -> None:
    found = moved_bytes(TableSize("table", 400_000, 64), IdFrequencies(8 * 1024), 2)
    dense = 512 * 128 + 128 + 128 * 64 + 64 + 64 + 1
    for place, (gathered_mb, host_mb) in _PLACED_MB.items():
        gathered, host = found[place]
        assert (gathered + 2 * 4 * dense) / 1e6 == pytest.approx(gathered_mb, rel=0.03)
        assert host / 1e6 == pytest.approx(host_mb, rel=0.03)


# The same page, "Parameter servers": 1 M rows of 64 by Zipf's law, one worker, two servers on one
# machine. Millions of ids a second.
_SERVED = {
    1_000: {"pulled": 1.3, "pushed": 0.8},
    10_000: {"pulled": 6.3, "pushed": 2.1},
    100_000: {"pulled": 10.7, "pushed": 3.4},
}


@pytest.mark.parametrize("num_ids", _SERVED)
def test_a_step_with_servers_takes_about_what_was_measured(num_ids: int) -> None:
    # Shared memory: a copy of each side.
    cluster = TableCluster(num_servers=2, server_bytes=1e9, server_bytes_per_s=6e9)
    costs = sg.embedding.TableCosts()
    ids = IdFrequencies(num_ids, exponent=1.0)
    own_s = server_s(TableSize("table", 10**6, 64), ids, cluster, costs, 2)
    predicted_s = own_s + 2 * (costs.message_s + costs.client_s)
    measured_s = sum(num_ids / (rate * 1e6) for rate in _SERVED[num_ids].values())
    assert 0.5 < predicted_s / measured_s < 2


def test_a_whole_table_is_bound_by_its_server_when_workers_share_it() -> None:
    table, ids = TableSize("table", 10**6, 64), IdFrequencies(10_000)
    costs = sg.embedding.TableCosts()
    seconds = {
        (workers, shards): server_s(
            table, ids, TableCluster(num_servers=4, num_workers=workers), costs, shards
        )
        for workers in (1, 8)
        for shards in (1, 4)
    }
    assert seconds[8, 1] > 2.5 * seconds[8, 4]
    assert seconds[1, 1] < 2 * seconds[1, 4]


def test_rows_found_in_a_cache_are_not_sent_but_cost_the_worker() -> None:
    table, ids, costs = TableSize("table", 10**6, 64), IdFrequencies(10_000), None
    costs = sg.embedding.TableCosts()
    slow = TableCluster(num_servers=2, server_bytes_per_s=1e8)
    fast = TableCluster(num_servers=2, server_bytes_per_s=1e12)
    half = ids.distinct(10**6) / 2
    assert server_s(table, ids, slow, costs, 2, half) < server_s(table, ids, slow, costs, 2)
    assert server_s(table, ids, fast, costs, 2, half) > server_s(table, ids, fast, costs, 2)


def test_small_tables_have_gradients_of_the_whole() -> None:
    small = moved_bytes(TableSize("days", 7, 16), IdFrequencies(10_000), 4)
    assert small["mirrored"] == (2 * 3 * 7 * 16 * 4, 0)


def test_devices_of_a_target_have_half_of_their_memory_for_tables() -> None:
    target = sg.planning.parse_target("8xH100")
    cluster = TableCluster(target=target)
    assert cluster.free_device_bytes == target.accelerator.pool_bytes / 2
    assert TableCluster().free_device_bytes == 0
    assert TableCluster(num_devices=3).devices.num_devices == 3


@pytest.mark.parametrize("options", [{"num_rows": 0}, {"row_size": 0}, {"num_slots": -1}])
def test_a_table_without_rows_is_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least one row and number"):
        TableSize("t", **{"num_rows": 1, "row_size": 1, **options})


@pytest.mark.parametrize(
    "options", [{"num_devices": 0}, {"num_workers": 0}, {"server_bytes_per_s": 0}]
)
def test_a_cluster_without_devices_or_links_is_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least one device and worker"):
        TableCluster(**options)
