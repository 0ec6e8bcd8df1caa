"""Time limits: functions of `sg.config`, one for each variable that is a number of seconds."""

from __future__ import annotations

import pytest

import stratagem as sg
from stratagem import config as time_limits
from stratagem import environment
from stratagem.environment import SECONDS


def test_every_limit_has_a_function() -> None:
    limits = [name for name, one in environment.VARIABLES.items() if one.parse is SECONDS]
    assert sorted(limits) == time_limits.__all__


@pytest.mark.parametrize("name", time_limits.__all__)
def test_limit_is_that_of_its_variable(monkeypatch, name) -> None:
    variable = environment.VARIABLES[name]
    monkeypatch.delenv(variable.name, raising=False)
    assert getattr(sg.config, name)() == variable.default
    monkeypatch.setenv(variable.name, "7.5")
    assert getattr(sg.config, name)() == 7.5
    monkeypatch.setenv(variable.name, "0")
    with pytest.raises(ValueError, match=f"{variable.name}: '0' is not a time limit"):
        getattr(sg.config, name)()
