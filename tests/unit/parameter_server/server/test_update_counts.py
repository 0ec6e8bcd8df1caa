"""Numbers of updates by kind, compared with plain counts."""

from __future__ import annotations

import pytest

from stratagem.group.transport.wire import Message
from stratagem.parameter_server.server.changes import KINDS, UpdateCounts, kind_of


@pytest.mark.parametrize(
    ("kind", "sign", "wanted"),
    [
        ("assign", 0, "assign"),
        ("assign", 1, "assign_add"),
        ("assign", -1, "assign_add"),
        ("scatter", 0, "scatter"),
        ("scatter", -1, "scatter_add"),
        ("push", 0, "push"),
        ("create", 0, None),
        ("pull", 0, None),
    ],
)
def test_each_request_has_its_kind(kind, sign, wanted) -> None:
    assert kind_of(Message(kind, {"sign": sign})) == wanted


def test_counts_are_there_again_after_a_restart() -> None:
    counts, restored = UpdateCounts(), UpdateCounts()
    for kind in ("assign_add", "push", "assign_add", "push", "assign_add"):
        counts.note_applied(kind)
    counts.resent["push"] += 1
    counts.repeated["assign_add"] += 2
    assert dict(zip(KINDS, counts.numbers(), strict=True)) == {
        "assign": 0,
        "assign_add": 3,
        "scatter": 0,
        "scatter_add": 0,
        "push": 2,
    }
    for _ in range(2):  # each entry of a journal has them
        restored.restore(counts.saved())
    assert restored.described() == counts.described()
    assert restored.described() == {
        "applied": {"assign_add": 3, "push": 2},
        "resent": {"push": 1},
        "repeated": {"assign_add": 2},
    }
    with pytest.raises(ValueError, match="shorter"):
        restored.restore({**counts.saved(), "resent": [1, 2]})
