"""Functions of `sg.config` that read one variable of the environment each."""

from __future__ import annotations

import pytest

import stratagem as sg
from stratagem import environment
from stratagem.environment import SECONDS

_LIMITS = [name for name, one in environment.VARIABLES.items() if one.parse is SECONDS]
_SETTINGS = {
    **dict.fromkeys(("allow_unauthenticated", "secret_file", "tls_dir"), "1"),
    **dict.fromkeys(("max_handshakes", "max_handshakes_per_address"), "1"),
    **dict.fromkeys(("input_service", "jobs_port", "upload_limit_bytes"), "7001"),
}


@pytest.mark.parametrize("name", _LIMITS)
def test_limit_is_that_of_its_variable(monkeypatch, name) -> None:
    variable = environment.VARIABLES[name]
    monkeypatch.delenv(variable.name, raising=False)
    assert getattr(sg.config, name)() == variable.default
    monkeypatch.setenv(variable.name, "7.5")
    assert getattr(sg.config, name)() == 7.5
    monkeypatch.setenv(variable.name, "0")
    with pytest.raises(ValueError, match=f"{variable.name}: '0' is not a time limit"):
        getattr(sg.config, name)()


@pytest.mark.parametrize("name", _SETTINGS)
def test_setting_is_that_of_its_variable(monkeypatch, name) -> None:
    variable = environment.VARIABLES[name]
    monkeypatch.delenv(variable.name, raising=False)
    assert getattr(sg.config, name)() == variable.default
    text = _SETTINGS[name]
    monkeypatch.setenv(variable.name, text)
    assert getattr(sg.config, name)() == variable.parse(text) != variable.default
