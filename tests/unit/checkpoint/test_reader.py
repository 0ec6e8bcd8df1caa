"""Reading arrays of a checkpoint by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import stratagem as sg


def test_arrays_are_listed_and_read_by_name(tmp_path: Path) -> None:
    table = np.arange(6, dtype="float32").reshape(2, 3)
    checkpoint = sg.train.Checkpoint(
        table=sg.Variable(table), state={"w": [np.zeros((0, 2), "int8")], "n": 3}
    )
    checkpoint.save(tmp_path / "ckpt")
    checkpoint.table.assign(table + 1)
    newest = checkpoint.save(tmp_path / "ckpt")
    for place in (tmp_path, newest):
        assert sg.train.list_variables(place) == [
            ("save_counter/value", []),
            ("state/n", []),
            ("state/w/0", [0, 2]),
            ("table/value", [2, 3]),
        ]
        np.testing.assert_array_equal(sg.train.load_variable(place, "table/value"), table + 1)
    reader = sg.train.load_checkpoint(newest)
    assert reader.get_variable_to_dtype_map()["state/w/0"] == "int8"
    assert reader.get_tensor("state/n").item() == 3
    assert reader.get_tensor("state/w/0").shape == (0, 2)
    assert [reader.has_tensor(name) for name in ("state/n", "n")] == [True, False]
    with pytest.raises(sg.errors.NotFoundError, match="holds no array 'n'"):
        reader.get_tensor("n")
    with pytest.raises(sg.errors.NotFoundError, match="does not exist"):
        sg.train.load_checkpoint(tmp_path / "other" / "ckpt-1")
