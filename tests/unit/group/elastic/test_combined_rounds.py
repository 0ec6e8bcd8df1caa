"""Rounds as bytes, and those that are kept."""

from __future__ import annotations

import pytest

from stratagem.group.elastic.backed_rounds import CombinedRound, CombinedRounds


@pytest.mark.parametrize(
    "results", [pytest.param((), marks=pytest.mark.slow), (b"",), (b"ab", b"", bytes(70_000))]
)
def test_a_round_is_the_same_after_it_was_sent(results) -> None:
    one = CombinedRound(2**40, (0, 2, 70_000), (0, 70_000), results)
    assert CombinedRound.decode(one.encode()) == one
    assert CombinedRound.decode(bytearray(one.encode())) == one


def test_rounds_are_kept_until_all_have_them() -> None:
    rounds = CombinedRounds()
    for number in (7, 5, 6):
        rounds.keep(CombinedRound(number, (0, 1), (0,), ()))
    assert [one.number for one in rounds.after(5)] == [6, 7]
    rounds.drop(6)
    assert [one.number for one in rounds.after(0)] == [7]
    assert len(rounds) == 1
