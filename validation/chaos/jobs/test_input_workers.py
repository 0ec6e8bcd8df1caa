"""Verdicts on what trainers got from input workers."""

from __future__ import annotations

import json

import pytest

from validation.chaos.jobs import Ended
from validation.chaos.jobs.input_workers import RunningInput, compare
from validation.chaos.sandbox import Sandbox


class _Judged(RunningInput):
    """A job that was not started."""

    def __post_init__(self) -> None:
        pass


def _lines():
    return [
        {"epoch": epoch, "examples": [one, one + 1]}
        for epoch in range(2)
        for one in range(0, 360, 2)
    ]


def test_each_example_once_an_epoch_is_as_promised() -> None:
    assert compare(_lines()).kind == "identical"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda lines: lines.pop(3), "2 lost: [(0, 6), (0, 7)]"),
        (lambda lines: lines.append(lines[-1]), "2 repeated: [(1, 358), (1, 359)]"),
        (lambda lines: lines[0].update(epoch=2), "2 lost: [(0, 0), (0, 1)]; 2 unknown"),
    ],
)
def test_what_is_lost_repeated_or_unknown_is_wrong(change, why) -> None:
    lines = _lines()
    change(lines)
    judged = compare(lines)
    assert judged.kind == "wrong"
    assert judged.why.startswith(why)


def test_all_ranks_have_to_end(tmp_path) -> None:
    sandbox = Sandbox(tree=tmp_path, work=tmp_path, notes=tmp_path, home=tmp_path, is_disk=False)
    job = _Judged(sandbox, [], {}, {}, is_exact=True)
    for rank in range(2):
        judged = job.verdict(Ended(0, ""), [])
        assert judged.kind == "wrong"
        assert judged.why.endswith(f"rank {rank} has not ended")
        own = "".join(json.dumps(line) + "\n" for line in _lines()[rank::2])
        (tmp_path / f"taken-{rank}").write_text(own)
        (tmp_path / f"end-{rank}").touch()
    assert job.verdict(Ended(0, ""), []).kind == "identical"
