"""Keyed tables that servers save and restore, as many servers as there are."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stratagem.errors import DataLossError
from stratagem.group.transport.connection import ServerError
from stratagem.group.transport.wire import Message
from stratagem.parameter_server.server import table_requests as table_copies
from stratagem.parameter_server.server.tables.saved_tables import TableVersions
from tests.unit.parameter_server.table_clusters import table_cluster

ADMITTING = {"admission": {"kind": "AfterSightings", "sightings": 2}}
EVICTING = {**ADMITTING, "eviction": {"kind": "LeastRecent"}, "max_rows": 30}
AGING = {"eviction": {"kind": "NotSeenFor", "steps": 20}}


@pytest.fixture
def versions(tmp_path) -> TableVersions:
    return TableVersions(tmp_path / "saved")


def _parts(versions: TableVersions, number: int) -> list[dict[str, Any]]:
    return versions.manifest(number)["tables"]["t"]["parts"]


def test_full_table_evicts_what_a_server_has_no_room_for(versions) -> None:
    with table_cluster(1, **{**EVICTING, "max_rows": 60}) as cluster:
        cluster.train(range(40))
        number = cluster.tables.save(versions)
        state, counters = cluster.state(), cluster.counters()
    with table_cluster(2, **{**EVICTING, "max_rows": 50}) as cluster:
        cluster.tables.restore(versions, number)
        found = cluster.state()
        assert found.items() <= state.items()
        assert cluster.client.describe()[0]["tables"]["t/part_0"]["rows"] == 25
        oldest = max(age for *_, age in found.values())
        for shard in cluster.shards():  # the others were older
            own = {*cluster.tables.layouts["t"].shards_of(np.array([*state])).tolist()}
            assert own == {0, 1}
            assert len(shard.keyed.rows) == 25
        lost = {key: values for key, values in state.items() if key not in found}
        assert min(age for *_, age in lost.values()) <= oldest
        counts = sum(values[-2] for values in lost.values())
        assert cluster.counters()["evicted_updates"] == counters["evicted_updates"] + counts
    with (
        table_cluster(1, max_rows=5) as cluster,
        pytest.raises(ServerError, match="60 rows of 't' were restored into one server"),
    ):
        cluster.tables.restore(versions, number)


@pytest.mark.slow
def test_changes_have_only_changed_rows(versions) -> None:
    with table_cluster(2) as cluster:
        cluster.train(range(100))
        first = cluster.tables.save(versions)
        cluster.client.push({}, {"t": (np.array([-5, 10**6]), np.ones((2, 2), np.float32))})
        second = cluster.tables.save(versions, since=first)
        third = cluster.tables.save(versions, since=second)
        since_first = cluster.tables.save(versions, since=first)

        def rows_of(number: int) -> int:
            return sum(part["rows"] for part in _parts(versions, number))

        num_first = cluster.counters()["created"] - 1
        assert [*map(rows_of, (first, second, third, since_first))] == [num_first, 2, 0, 2]
        state = cluster.state()
        for number in (second, third, since_first):
            cluster.train(range(5))
            cluster.tables.restore(versions, number)
            assert cluster.state() == state
        # saves to two folders do not disturb each other
        other = TableVersions(versions.folder / "other")
        own = cluster.tables.save(other)
        cluster.client.push({}, {"t": (np.array([-5]), np.ones((1, 2), np.float32))})
        assert rows_of(cluster.tables.save(versions, since=since_first)) == 1
        (changed,) = [
            one for one in _parts(other, cluster.tables.save(other, since=own)) if one["rows"]
        ]
        assert changed["rows"] == 1


def test_save_is_the_table_between_two_updates(versions, monkeypatch) -> None:
    """Rows change, are made and freed while pieces are written."""
    monkeypatch.setattr(table_copies, "_MOST_COPIED_BYTES", 600)
    with table_cluster(1, **EVICTING) as cluster, table_cluster(1, **EVICTING) as second:
        cluster.train(range(30))
        first = cluster.tables.save(versions)
        (shard,) = cluster.shards()
        pieces, rounds, step = shard.pieces, [], 30

        def training(marks):
            nonlocal step
            rounds.append(len(marks.rows))
            for part in pieces(marks):
                yield part
                if len(rounds) % 4:
                    cluster.train(range(step, step + 3))
                    step += 3

        monkeypatch.setattr(shard, "pieces", training)
        for since in (None, first):
            rounds.clear()
            number = cluster.tables.save(versions, since)
            state, counters = cluster.state(), cluster.counters()
            assert len(rounds) == 4
            assert since is not None or rounds[0] == shard.keyed.rows.num_slots
            second.tables.restore(versions, number)
            assert (second.state(), second.counters()) == (state, counters)


def test_server_that_forgot_saves_all_rows(versions) -> None:
    with table_cluster(1) as cluster:
        cluster.train(range(5))
        number = cluster.tables.save(versions)
        cluster.shards()[0].saves.clear()  # as after a restart
        state = cluster.state()
        number = cluster.tables.save(versions, since=number)
        (part,) = _parts(versions, number)
        assert (part["base"], part["rows"]) == (None, len(state))
        cluster.train(range(5))
        cluster.tables.restore(versions, number)
        assert cluster.state() == state


def test_table_that_does_not_fit_is_refused(versions) -> None:
    with table_cluster(1) as cluster:
        number = cluster.tables.save(versions)
        cluster.create("other")
        with pytest.raises(
            ValueError, match=r"no table 'other'.\nExpected one of its tables: \['t'"
        ):
            cluster.tables.restore(versions, number)
    with table_cluster(1, dtype="float64") as cluster:
        with pytest.raises(ValueError, match=r"rows of shape \[2\] and dtype float32"):
            cluster.tables.restore(versions, number)
        with pytest.raises(DataLossError, match=r"manifest\.json cannot be read: it is missing"):
            cluster.tables.save(versions, since=7)
    assert versions.numbers == [number]


def test_folder_that_a_server_cannot_see(versions, monkeypatch) -> None:
    with table_cluster(1) as cluster:
        monkeypatch.setattr(TableVersions, "begin", lambda self: 1)
        with pytest.raises(
            OSError, match=r"1 of 1 parameter servers could not(.|\n)*does not see the folder"
        ):
            cluster.tables.save(versions)


def test_keys_are_exported_only_if_the_table_allows_it() -> None:
    with table_cluster(2) as cluster, table_cluster(2, allow_row_export=True) as open_cluster:
        for one in (cluster, open_cluster):
            one.train(range(10))
        rows = [rows for keys, rows in cluster.tables.pieces("t", with_keys=False) if keys is None]
        wanted = sorted(values[:2] for values in cluster.state().values())
        assert sorted(map(tuple, np.concatenate(rows).tolist())) == wanted
        with pytest.raises(ServerError, match="keys of 't/part_0' were requested"):
            next(cluster.tables.pieces("t", with_keys=True))
        found: dict[int, tuple[float, ...]] = {}
        for keys, rows in open_cluster.tables.pieces("t", with_keys=True):
            assert keys is not None
            found |= dict(zip(keys.tolist(), map(tuple, rows.tolist()), strict=True))
        assert found == {key: values[:2] for key, values in open_cluster.state().items()}


def tiers(folder: Path, memory_bytes: int = 2_000) -> dict[str, Any]:
    return {"tiers": {"memory_bytes": memory_bytes, "folder": str(folder)}}


@pytest.mark.parametrize(
    ("storage_dtype", "options"),
    [
        (None, ADMITTING),
        pytest.param("bfloat16", ADMITTING, marks=pytest.mark.slow),
        pytest.param("int8", ADMITTING, marks=pytest.mark.slow),
        pytest.param(None, EVICTING, marks=pytest.mark.slow),
        pytest.param(None, AGING, marks=pytest.mark.slow),
    ],
)
def test_training_after_a_restore_is_training_that_continued(
    versions, tmp_path, storage_dtype, options
) -> None:
    """In memory and on disk, from either."""
    options = {"storage_dtype": storage_dtype, **options}
    with (
        table_cluster(2, **options) as plain,
        table_cluster(2, **options, **tiers(tmp_path / "one")) as tiered,
        table_cluster(2, **options, **tiers(tmp_path / "two")) as second,
    ):
        second.train(range(5))  # these rows are replaced
        tiered.train(range(20))
        number = tiered.tables.save(versions)
        for begin in (20, 30):
            tiered.train(range(begin, begin + 10))
            number = tiered.tables.save(versions, since=number)
        for one in (plain, second):
            one.tables.restore(versions, number)
            assert one.state() == tiered.state()
        for one in (plain, tiered, second):
            one.train(range(40, 60))
        assert plain.state() == tiered.state() == second.state()
        assert plain.counters() == tiered.counters() == second.counters()
        again = second.tables.save(versions, since=number)  # continues what was loaded
        assert all(part["base"] for part in _parts(versions, again))
        tiered.tables.restore(versions, again)
        assert tiered.state() == plain.state()


@pytest.mark.parametrize("storage_dtype", [None, pytest.param("int8", marks=pytest.mark.slow)])
def test_rows_move_between_servers_with_tiers_and_in_memory(
    versions, tmp_path, storage_dtype
) -> None:
    state, number = {}, 0
    on_disk = tiers(tmp_path / "tiers", 600)
    for num_servers, options in ((3, {}), (2, on_disk), (3, {})):
        with table_cluster(num_servers, storage_dtype=storage_dtype, **options) as cluster:
            if number:
                cluster.tables.restore(versions, number)
                described = [one["tables"] for one in cluster.client.describe().values()]
                num_hot = sum(table["hot"] for tables in described for table in tables.values())
                assert (num_hot == 0) == bool(options)
                assert cluster.state() == state
            cluster.train(range(20 * num_servers, 20 * num_servers + 20))
            number = cluster.tables.save(versions)
            state = cluster.state()
    # the same training on one server, without any restore: its rows are rounded alike
    with table_cluster(1, storage_dtype=storage_dtype) as cluster:
        for num_servers in (3, 2, 3):
            cluster.train(range(20 * num_servers, 20 * num_servers + 20))
        assert cluster.state() == state


def test_rows_of_another_dtype_are_rounded_when_they_are_restored(versions) -> None:
    with table_cluster(1) as exact, table_cluster(2, storage_dtype="bfloat16") as rounded:
        exact.train(range(30))
        rounded.tables.restore(versions, exact.tables.save(versions))
        assert {*rounded.state()} == {*exact.state()}
        keys = np.array([*exact.state()])
        found, wanted = (one.client.pull_rows("t", keys) for one in (rounded, exact))
        assert (np.abs(found - wanted) <= np.abs(wanted) * 2**-7).all()
        assert (found != wanted).any()
        number = rounded.tables.save(versions, since=1)  # its files have another format
        assert all(part["base"] is None for part in _parts(versions, number))
        exact.tables.restore(versions, number)
        np.testing.assert_array_equal(exact.client.pull_rows("t", keys), found)


def test_answers_to_pulls_have_stored_rows() -> None:
    keys = np.arange(1000)
    for storage_dtype, num_bytes in ((None, 8000), ("bfloat16", 4000), ("int8", 6000)):
        with table_cluster(1, storage_dtype=storage_dtype) as cluster:
            rows = cluster.client.pull_rows("t", keys)
            assert (rows.dtype, rows.shape) == (np.float32, (1000, 2))
            np.testing.assert_array_equal(rows, cluster.servers[0].store.pull_rows("t", keys))
            message = Message("pull_rows", {"names": ["t"]}, [keys])
            answer = cluster.servers[0]._pull_rows(message)
            assert sum(array.nbytes for array in answer.arrays) == num_bytes


def test_load_that_fails_says_to_restore_again(versions, monkeypatch) -> None:
    with table_cluster(2) as cluster:
        cluster.train(range(10))
        number = cluster.tables.save(versions)

        def fail(*args: object, **fields: object) -> None:
            raise OSError("disk full")

        monkeypatch.setattr(cluster.servers[1]._tables, "_fill", fail)
        with pytest.raises(ServerError, match="disk full") as raised:
            cluster.tables.restore(versions, number)
        assert raised.value.__notes__[-1].endswith("others not: restore again.")
        monkeypatch.undo()
        cluster.tables.restore(versions, number)


def test_restored_table_survives_a_restart_of_its_server(versions, tmp_path) -> None:
    """The journal frees rows that the restored table does not have."""
    with table_cluster(1, **AGING) as cluster:
        cluster.train(range(10))
        number = cluster.tables.save(versions)
        state = cluster.state()
        journal = tmp_path / "journal"
        with table_cluster(1, journal=journal, **AGING) as durable:
            durable.train(range(30), num_keys=3000)
            durable.client.journal()
            durable.tables.restore(versions, number)
            assert durable.state() == state
            killed = Path(shutil.copyfile(journal, tmp_path / "killed"))
        with table_cluster(1, with_table=False, journal=killed) as restarted:
            restarted.create(**AGING)
            assert restarted.state() == state
            for one in (cluster, restarted):
                one.train(range(40, 60))
            assert restarted.state() == cluster.state()
