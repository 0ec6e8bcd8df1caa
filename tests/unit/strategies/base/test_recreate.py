"""A strategy records its constructor call, so that another process can repeat it."""

from __future__ import annotations

import copy

import pytest

import stratagem as sg


def test_strategy_is_recreated_with_its_arguments() -> None:
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops=sg.RingAllReduce())
    assert strategy.recreate is not None
    again = strategy.recreate()
    assert again is not strategy
    assert repr(again) == repr(strategy)
    assert type(again.cross_device_ops) is sg.RingAllReduce


def test_copy_can_be_recreated() -> None:
    copied = copy.deepcopy(sg.MirroredStrategy(["cpu:0", "cpu:1"]))
    assert copied.recreate is not None
    assert copied.recreate().num_replicas_in_sync == 2


def test_strategy_without_a_recorded_call_has_none() -> None:
    assert sg.get_strategy().recreate is None


def test_argument_of_tensorflow_names_the_new_one() -> None:
    with pytest.raises(TypeError, match=r"received num_gpus=2.*\n.*\n?Fix: write"):
        sg.MirroredStrategy(num_gpus=2)  # pyright: ignore[reportCallIssue]
