"""Exported tables, read by pyarrow alone."""

from __future__ import annotations

import os
import sys

import numpy as np
import pytest

from stratagem.parameter_server.embedding import export
from tests.unit.parameter_server.embedding.test_serving import strategy_of
from tests.unit.parameter_server.table_clusters import TableCluster, table_cluster


def rows_of(cluster: TableCluster) -> dict[int, tuple[float, ...]]:
    return {key: values[:2] for key, values in cluster.state().items()}


@pytest.mark.parametrize("format", ["parquet", "arrow"])
def test_file_has_all_rows(tmp_path, format) -> None:
    arrow = pytest.importorskip("pyarrow")
    with table_cluster(2, allow_row_export=True) as cluster:
        cluster.create("a/b", dtype="bfloat16", allow_row_export=True)
        cluster.create("c", storage_dtype="int8", allow_row_export=True)
        for name in ("t", "c"):
            cluster.train(range(10), name)
        strategy = strategy_of(cluster)
        paths = export(tmp_path / "with", format=format, with_keys=True, strategy=strategy)
        without = export(tmp_path / "without", format=format, strategy=strategy)
        wanted = rows_of(cluster)
        keys = np.array([*cluster.state("c")])
        rounded = cluster.client.pull_rows("c", keys)
        with pytest.raises(FileExistsError, match="with already exists"):
            export(tmp_path / "with", strategy=strategy)
    assert [os.path.basename(path) for path in paths] == [
        f"{name}.{format}" for name in ("t", "a%2Fb", "c")
    ]
    assert sorted(os.listdir(tmp_path)) == ["with", "without"]

    def read(path: str):
        if format == "parquet":
            return pytest.importorskip("pyarrow.parquet").read_table(path)
        return arrow.ipc.open_file(path).read_all()

    table = read(paths[0])
    assert table.schema.field("row").type == arrow.list_(arrow.float32(), 2)
    found = dict(zip(table["key"].to_pylist(), map(tuple, table["row"].to_pylist()), strict=True))
    assert found == wanted
    table = read(without[0])
    assert table.column_names == ["row"]
    assert sorted(map(tuple, table["row"].to_pylist())) == sorted(wanted.values())
    table = read(paths[2])
    assert table.schema.field("row").type == arrow.list_(arrow.float32(), 2)
    found = dict(zip(table["key"].to_pylist(), table["row"].to_pylist(), strict=True))
    assert found == dict(zip(keys.tolist(), rounded.tolist(), strict=True))
    empty = read(paths[1])
    assert (empty.num_rows, empty.column_names) == (0, ["key", "row"])


def test_keys_need_the_flag(tmp_path, monkeypatch) -> None:
    pytest.importorskip("pyarrow")
    with table_cluster(1) as cluster:
        strategy = strategy_of(cluster)
        with pytest.raises(PermissionError, match=r"The keys of the tables \['t'\]"):
            export(tmp_path / "rows", with_keys=True, strategy=strategy)

        def fail(*arguments: object, **options: object) -> None:
            raise OSError("disk full")

        monkeypatch.setattr(cluster.client, "ask_about_tables", fail)
        with pytest.raises(OSError, match="disk full"):
            export(tmp_path / "rows", strategy=strategy)
    assert not os.listdir(tmp_path)


def test_another_format_and_no_library(tmp_path, monkeypatch) -> None:
    with pytest.raises(ValueError, match="Tables cannot be exported as 'csv'"):
        export(tmp_path / "rows", format="csv")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with (
        table_cluster(1) as cluster,
        pytest.raises(ImportError, match=r"export needs pyarrow(.|\n)*pip install 'stratagem\[da"),
    ):
        export(tmp_path / "rows", strategy=strategy_of(cluster))
    assert not os.listdir(tmp_path)
