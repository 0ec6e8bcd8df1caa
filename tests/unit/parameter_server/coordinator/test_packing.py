"""The interface for pickling between coordinator and workers, and Keras's implementation of it."""

from __future__ import annotations

import dataclasses
import inspect
import pickle

import pytest

from stratagem.parameter_server.coordinator.shipping import Packing, Resource
from stratagem.parameter_server.keras.pickling import KerasPacking


@pytest.mark.parametrize("name", ["pack", "unpack", "take_built", "collected", "build"])
def test_implementation_takes_the_arguments_of_the_interface(name) -> None:
    wanted = inspect.signature(getattr(Packing, name)).parameters
    assert list(inspect.signature(getattr(KerasPacking, name)).parameters) == list(wanted)


def test_resources_are_equal_by_their_number_in_every_process() -> None:
    again = pickle.loads(pickle.dumps(Resource(3)))
    assert {again, Resource(3), Resource(4)} == {Resource(3), Resource(4)}
    with pytest.raises(dataclasses.FrozenInstanceError):
        again.number = 5
