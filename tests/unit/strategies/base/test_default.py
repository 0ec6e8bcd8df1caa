"""The default strategy."""

from __future__ import annotations

import stratagem as sg
from stratagem.strategies.base.strategy import DefaultStrategy


def test_there_is_one_default_strategy_and_it_is_no_strategy_of_devices() -> None:
    default = sg.get_strategy()
    assert isinstance(default, DefaultStrategy)
    assert sg.get_strategy() is default
    assert default.topology.devices is None
    assert repr(default) == "DefaultStrategy()"
