"""Older names of strategy methods."""

from __future__ import annotations

from stratagem.strategies.base.strategy import Strategy


def test_long_and_short_names_are_the_same() -> None:
    assert Strategy.experimental_local_results is Strategy.local_results
    assert (
        Strategy.experimental_distribute_values_from_function
        is Strategy.distribute_values_from_function
    )
    assert Strategy.concat is Strategy.gather
