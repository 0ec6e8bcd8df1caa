"""Lines from a stream, for any split into pieces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratagem.launch.tasks import output as line_buffer
from stratagem.launch.tasks.output import PATIENCE_S, LineBuffer


@pytest.fixture(autouse=True)
def patience(monkeypatch) -> None:
    monkeypatch.setattr(line_buffer, "PATIENCE_S", PATIENCE_S)


@pytest.mark.parametrize(
    ("pieces", "complete", "rest"),
    [
        ([b"a\nb\n"], [b"a", b"b"], []),
        ([b"a", b"b\nc"], [b"ab"], [b"c"]),
        ([b"\n\n"], [b"", b""], []),
        ([b"a\r\n", b"b\r", b"\n"], [b"a", b"b"], []),
        # A bar: what stands on the line when it ends.
        ([b"1%\r", b"2%\r", b"3%\n"], [b"3%"], []),
        ([b"\r1%", b"\r2%", b"\n"], [b"2%"], []),
        ([b"1%\r2%\r"], [], [b"2%"]),
        ([b"x" * 100_000], [b"x" * 65536], [b"x" * (100_000 - 65536)]),
    ],
)
def test_pieces_become_lines(pieces, complete, rest) -> None:
    splitter = LineBuffer()
    assert [line for piece in pieces for line in splitter.feed(piece, 0.0)] == complete
    assert splitter.rest() == rest
    assert splitter.rest() == []


@given(st.lists(st.binary(max_size=5).map(lambda text: text.replace(b"\r", b"")), max_size=20))
def test_without_carriage_returns_nothing_is_lost(pieces) -> None:
    splitter = LineBuffer()
    complete = [line for piece in pieces for line in splitter.feed(piece, 0.0)]
    whole = b"".join(pieces)
    assert b"\n".join([*complete, *(splitter.rest() or [b""])]) == whole
    assert len(complete) == whole.count(b"\n")


def test_bar_is_shown_once_a_moment() -> None:
    splitter, shown = LineBuffer(), []
    for tenth in range(31):
        now_s = tenth * PATIENCE_S / 10
        assert splitter.feed(f"{tenth}%\r".encode(), now_s) == []
        shown += splitter.overdue(now_s)
    assert shown == [b"10%", b"21%"]
    assert splitter.rest() == [b"30%"]


@pytest.mark.parametrize(
    ("pieces", "rewritten"),
    [
        ([b"a"], None),
        ([b"a\r"], b"a"),
        ([b"\r1%", b"\r2%"], b"2%"),
        ([b"1%\r", b"2%"], b"2%"),
        ([b"1%\r2%\n"], None),
        ([b"1%\r2%\n", b"prompt"], None),
    ],
)
def test_line_with_carriage_returns_is_being_rewritten(pieces, rewritten) -> None:
    splitter = LineBuffer()
    for piece in pieces:
        splitter.feed(piece, 0.0)
    assert splitter.rewritten == rewritten
    splitter.rest()
    assert splitter.rewritten is None
