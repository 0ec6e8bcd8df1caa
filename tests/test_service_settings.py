"""Settings of services."""

from __future__ import annotations

import pytest

from stratagem import config as service_settings
from stratagem import environment


@pytest.mark.parametrize("name", service_settings.__all__)
def test_setting_is_read_from_the_environment_each_time(monkeypatch, name) -> None:
    variable = environment.VARIABLES[name]
    monkeypatch.delenv(variable.name, raising=False)
    assert getattr(service_settings, name)() == variable.default
    monkeypatch.setenv(variable.name, "7001")
    assert str(getattr(service_settings, name)()) == "7001"
