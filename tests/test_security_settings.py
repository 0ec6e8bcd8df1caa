"""Settings of authentication and encryption: functions of `sg.config`, one for each variable."""

from __future__ import annotations

import pytest

import stratagem as sg
from stratagem import config as security_settings
from stratagem import environment


@pytest.mark.parametrize("name", security_settings.__all__)
def test_setting_is_that_of_its_variable(monkeypatch, name) -> None:
    variable = environment.VARIABLES[name]
    monkeypatch.delenv(variable.name, raising=False)
    assert getattr(sg.config, name)() == variable.default
    monkeypatch.setenv(variable.name, "1")
    assert getattr(sg.config, name)() == variable.parse("1") != variable.default
