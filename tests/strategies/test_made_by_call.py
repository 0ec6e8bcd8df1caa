"""A strategy can be made again from its class and arguments."""

from __future__ import annotations

import copy

import pytest

import stratagem as sg


def test_strategy_is_made_again_with_its_arguments() -> None:
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops=sg.RingAllReduce())
    again = strategy.made_again()()
    assert again is not strategy
    assert repr(again) == repr(strategy)
    assert type(again.cross_device_ops) is sg.RingAllReduce


def test_copy_can_be_made_again_too() -> None:
    copied = copy.deepcopy(sg.MirroredStrategy(["cpu:0", "cpu:1"]))
    assert copied.made_again()().num_replicas_in_sync == 2


def test_strategy_that_no_call_has_made_says_so() -> None:
    made = object.__new__(sg.OneDeviceStrategy)
    with pytest.raises(ValueError, match="no call of its class has made it"):
        made.made_again()
