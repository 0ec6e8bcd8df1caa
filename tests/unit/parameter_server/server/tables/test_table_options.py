"""Options of a keyed table as JSON."""

from __future__ import annotations

import pytest

from stratagem.parameter_server.server.tables.policies import AfterSightings, LeastRecent
from stratagem.parameter_server.server.tables.table_options import (
    RowInitializer,
    TableOptions,
    TierOptions,
)


def test_options_are_read_from_fields() -> None:
    assert TableOptions.from_fields({}) == TableOptions(RowInitializer())
    got = TableOptions.from_fields(
        {
            "initializer": {"kind": "uniform", "a": -1, "b": 1, "seed": 3},
            "admission": {"kind": "AfterSightings", "sightings": 2},
            "eviction": {"kind": "LeastRecent"},
            "max_rows": 7,
            "storage_dtype": "int8",
            "tiers": {"memory_bytes": 100, "folder": "/disk"},
        }
    )
    uniform = RowInitializer("uniform", -1, 1, 3)
    tiers = TierOptions(100, "/disk")
    assert got == TableOptions(uniform, AfterSightings(2), LeastRecent(), 7, False, tiers, "int8")


def test_options_that_servers_do_not_have_are_refused() -> None:
    with pytest.raises(ValueError, match=r"the options \['engine'\], which"):
        TableOptions.from_fields({"engine": "rocks"})
    with pytest.raises(ValueError, match="storage_dtype='int4'"):
        TableOptions.from_fields({"storage_dtype": "int4"})
    with pytest.raises(ValueError, match="max_rows=0"):
        TableOptions.from_fields({"max_rows": 0})


@pytest.mark.parametrize(
    "tiers",
    [
        {},
        {"memory_bytes": 1},
        {"memory_bytes": 0, "folder": "/disk"},
        {"memory_bytes": 1, "folder": ""},
        {"memory_bytes": 1, "folder": "/disk", "engine": "rocks"},
    ],
)
def test_tiers_need_memory_and_a_folder(tiers) -> None:
    with pytest.raises(ValueError, match="A keyed table has the tiers"):
        TableOptions.from_fields({"tiers": tiers})
