"""A distribution of Keras's own beside a strategy is ignored, and said to be, once."""

from __future__ import annotations

import warnings

import keras
import pytest

from stratagem.keras.variables import creation as other_distribution
from tests.parity.comparison import mirrored


@pytest.fixture(autouse=True)
def nothing_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(other_distribution, "_warned_of", set())


@pytest.mark.parametrize("is_outer", [True, False])
def test_distribution_is_warned_of_once(is_outer) -> None:
    distribution = keras.distribution.DataParallel(devices=["cpu:0", "cpu:1"])
    strategy = mirrored(2)
    outer, inner = (distribution, strategy) if is_outer else (strategy, distribution)
    warned = pytest.warns(RuntimeWarning, match="DataParallel is current .* is ignored")
    with warned as caught, outer.scope(), inner.scope():
        keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    assert "Fix: leave out keras.distribution" in str(caught[0].message)
    assert len(caught) == 1


def test_strategy_alone_and_distribution_alone_are_fine() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        with mirrored(2).scope():
            keras.layers.Dense(2).build((None, 3))
        with keras.distribution.DataParallel(devices=["cpu:0"]).scope():
            keras.layers.Dense(2).build((None, 3))
