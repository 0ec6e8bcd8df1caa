"""Times of steps in turns: the methods, and their medians."""

from __future__ import annotations

from benchmarks.slow_links.turns import IN_TURNS, Turn, medians


def turn(method: str, step_s: float) -> Turn:
    return Turn(method=method, step_s=step_s, step_cpu_s=step_s / 2, step_bytes=100.0)


def test_medians_are_those_of_each_method_in_order() -> None:
    turns = [turn(name, s) for s in (3.0, 1.0, 2.0) for name in ("b", "a")]
    found = medians([*turns, turn("a", 9.0), turn("a", 9.0)])
    assert [(one.method, one.step_s, one.step_cpu_s) for one in found] == [
        ("b", 2.0, 1.0),
        ("a", 3.0, 1.5),
    ]


def test_each_overlap_is_beside_the_same_method_without() -> None:
    for one in IN_TURNS:
        if one.overlap:
            assert any(
                (other.kind, other.period, other.overlap) == (one.kind, one.period, 0)
                for other in IN_TURNS
            )
            assert one.overlap < one.period
