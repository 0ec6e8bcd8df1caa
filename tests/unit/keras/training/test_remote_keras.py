"""The interface of remote state for Keras, and the implementation that parameter servers give."""

from __future__ import annotations

import inspect

import pytest

from stratagem.keras.training.remote_keras import RemoteKeras
from stratagem.parameter_server.keras.server_keras import ServerKeras

METHODS = [name for name, value in vars(RemoteKeras).items() if inspect.isfunction(value)]
METHODS = [name for name in METHODS if not name.startswith("_")]


@pytest.mark.parametrize("name", METHODS)
def test_parameter_servers_take_the_arguments_of_the_interface(name) -> None:
    wanted = inspect.signature(getattr(RemoteKeras, name)).parameters
    given = inspect.signature(getattr(ServerKeras, name)).parameters
    kinds = {key: value.kind for key, value in wanted.items() if key != "self"}
    assert kinds == {key: value.kind for key, value in given.items() if key != "self"}


def test_interface_is_not_empty_and_cannot_be_made() -> None:
    assert len(METHODS) >= 8
    with pytest.raises(TypeError, match="Protocols cannot be instantiated"):
        RemoteKeras()
