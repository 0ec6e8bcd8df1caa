"""Options of a keyed table as JSON."""

from __future__ import annotations

import pytest

from stratagem.parameter_server.server.tables.policies import AfterSightings, LeastRecent
from stratagem.parameter_server.server.tables.row_initializer import RowInitializer
from stratagem.parameter_server.server.tables.table_options import TableOptions


def test_options_are_read_from_fields() -> None:
    assert TableOptions.from_fields({}) == TableOptions(RowInitializer())
    got = TableOptions.from_fields(
        {
            "initializer": {"kind": "uniform", "a": -1, "b": 1, "seed": 3},
            "admission": {"kind": "AfterSightings", "sightings": 2},
            "eviction": {"kind": "LeastRecent"},
            "max_rows": 7,
            "storage_dtype": None,
        }
    )
    uniform = RowInitializer("uniform", -1, 1, 3)
    assert got == TableOptions(uniform, AfterSightings(2), LeastRecent(), 7)


def test_options_that_servers_do_not_have_are_refused() -> None:
    with pytest.raises(ValueError, match=r"the options \['storage_dtype', 'tiers'\], which"):
        TableOptions.from_fields({"storage_dtype": "int8", "tiers": {}})
    with pytest.raises(ValueError, match="max_rows=0"):
        TableOptions.from_fields({"max_rows": 0})
