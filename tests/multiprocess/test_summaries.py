"""With several processes the chief alone writes, and what it writes is that of one process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.multiprocess.cluster import PROGRAMS, run_alone, run_cluster
from tests.unit.execution.summary.events import Read

_PROGRAM = str(PROGRAMS / "summaries.py")
_FOLDERS = ("fit/train", "fit/validation", "loop")


@pytest.mark.slow
def test_loop_is_written_by_the_chief(tmp_path: Path) -> None:
    every = run_cluster([_PROGRAM, str(tmp_path), "loop"], 2)
    for one in every:
        assert one.code == 0, one.errors
    assert [one.output.split("\n")[-2] for one in every] == ["written", "not written"]
    assert len(list((tmp_path / "loop").iterdir())) == 1
    found = Read(tmp_path / "loop")
    x = np.random.default_rng(0).random((32, 4), np.float32)
    own = [(step, x[8 * step : 8 * step + 4].sum()) for step in range(3)]
    assert found.numbers("rows") == [(step, pytest.approx(total)) for step, total in own]
    every_row = [(step + 1, x[8 * step : 8 * step + 8].sum()) for step in range(3)]
    assert found.numbers("total") == [(step, pytest.approx(total)) for step, total in every_row]


@pytest.mark.slow
@pytest.mark.parametrize("shard_state", [[], ["all"]])
def test_chief_writes_what_one_process_does(shard_state: list[str], tmp_path: Path) -> None:
    alone = run_alone([_PROGRAM, str(tmp_path / "alone"), "fit", *shard_state])
    assert alone.code == 0, alone.errors
    every = run_cluster([_PROGRAM, str(tmp_path / "cluster"), "fit", *shard_state], 2)
    for one in every:
        assert one.code == 0, one.errors
    assert [one.output.split("\n")[-2] for one in every] == ["written", "not written"]
    for folder in _FOLDERS:
        assert len(list((tmp_path / "cluster" / folder).iterdir())) == 1
        ours, wanted = (Read(tmp_path / place / folder) for place in ("cluster", "alone"))
        assert ours.tags == wanted.tags
        assert ours.tags
        for tag in ours.tags:
            assert ours.steps(tag) == wanted.steps(tag)
            if ours.plugin(tag) == "images":
                continue
            for (_, value), (_, other) in zip(ours.tensors(tag), wanted.tensors(tag), strict=True):
                if ours.plugin(tag) == "scalars":
                    np.testing.assert_allclose(value, other, rtol=1e-4)
                else:  # a last bit may put an element into the next bucket
                    np.testing.assert_allclose(value[:, :2], other[:, :2], rtol=1e-3, atol=1e-5)
                    assert value[:, 2].sum() == other[:, 2].sum()
