"""Values as JSON: arrays and numbers come back from text."""

from __future__ import annotations

import json

import numpy as np

from stratagem.keras.json_values import from_json, to_json


def test_arrays_and_numbers_come_back_from_text() -> None:
    value = {
        "none": None,
        "list": [1, 2.5, "text", float("inf")],
        "tuple": (np.float32(0.1), np.int64(3), np.bool_(True)),
        "array": np.arange(6, dtype=np.uint16).reshape(2, 3),
        "scalar": np.array(2.0),
        "empty": np.zeros((0, 2), "float32"),
    }
    got = from_json(json.loads(json.dumps(to_json(value))))
    assert got["none"] is None
    assert got["list"] == value["list"]
    assert got["tuple"] == [float(np.float32(0.1)), 3, True]
    for name in ("array", "scalar", "empty"):
        assert got[name].dtype == value[name].dtype
        np.testing.assert_array_equal(got[name], value[name])
        got[name][...] = 0  # its own memory
