"""Datasets that Ray Data reads, beside its own batches."""

from __future__ import annotations

import json
from pathlib import Path

_PROGRAM = Path(__file__).parent / "programs" / "reading_ray_data.py"


def test_strategies_read_each_row_of_ray_data_once(run) -> None:
    found = json.loads(run(str(_PROGRAM)).splitlines()[-1])
    own, sizes = found["sizes"]
    assert own == sizes
    assert found["ids"] == found["part"] == list(range(50))
    assert found["are_squares"]
    assert found["totals"] == [sum(range(50))] * 2
