"""Saved versions by the library's functions."""

from __future__ import annotations

import pytest

from stratagem.errors import DataLossError, NotFoundError
from stratagem.parameter_server.embedding.saving import compact, restore, save
from tests.unit.parameter_server.embedding.test_serving import strategy_of
from tests.unit.parameter_server.table_clusters import table_cluster


def test_newest_version_is_restored_unless_one_is_chosen(tmp_path) -> None:
    with table_cluster(1) as cluster:
        strategy = strategy_of(cluster)
        with pytest.raises(NotFoundError, match="has no versions of tables"):
            restore(tmp_path, strategy=strategy)
        states = []
        number = None
        for step in range(3):
            cluster.train(range(step, step + 1))
            number = save(tmp_path, since=number, strategy=strategy)
            states.append(cluster.state())
        assert restore(tmp_path, 1, strategy=strategy) == 1
        assert cluster.state() == states[0]
        assert restore(tmp_path, strategy=strategy) == number == 3
        assert cluster.state() == states[2]
        compact(tmp_path, 2)
        for version in (2, 3):
            restore(tmp_path, version, strategy=strategy)
            assert cluster.state() == states[version - 1]
        with pytest.raises(NotFoundError, match="no version 1 of tables"):
            restore(tmp_path, 1, strategy=strategy)
        with pytest.raises(DataLossError, match="it is missing"):
            save(tmp_path, since=1, strategy=strategy)
    with pytest.raises(NotFoundError, match="no version 9 of tables"):
        compact(tmp_path, 9)
