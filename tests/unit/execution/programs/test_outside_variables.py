"""Variables of no strategy, which processes that join receive as well."""

from __future__ import annotations

import keras
import pytest

import stratagem as sg
from stratagem.execution.programs.elastic_lockstep import OutsideVariables


def test_they_are_in_the_order_of_their_first_use() -> None:
    with sg.OneDeviceStrategy("cpu:0").scope():
        own = sg.Variable(1.0)
    first, second = keras.Variable(1.0), keras.Variable(2.0)
    outside = OutsideVariables()
    outside.note([first, own, second, first], "step")
    assert [id(one) for one in outside] == [id(first), id(second)]
    del second
    assert [id(one) for one in outside] == [id(first)]


def test_values_that_were_not_received_are_refused() -> None:
    first, second = keras.Variable(1.0), keras.Variable(2.0, name="late")
    outside = OutsideVariables()
    outside.note([first], "step")
    outside.end()
    outside.note([first], "step")
    with pytest.raises(ValueError, match="step uses variable 'late', which was made outside"):
        outside.note([second], "step")
