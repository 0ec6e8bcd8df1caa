"""CommunicationOptions: valid and invalid values."""

from __future__ import annotations

import dataclasses

import pytest

import stratagem as sg


def test_options_have_tensorflows_defaults_and_are_frozen() -> None:
    options = sg.CommunicationOptions()
    assert options.bytes_per_pack == 0
    assert options.timeout_seconds is None
    assert options.implementation is sg.CommunicationImplementation.AUTO
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.bytes_per_pack = 1


@pytest.mark.parametrize("name", ["NCCL", "nccl", sg.CommunicationImplementation.NCCL])
def test_implementation_may_be_named(name) -> None:
    options = sg.CommunicationOptions(implementation=name)
    assert options.implementation is sg.CommunicationImplementation.NCCL


@pytest.mark.parametrize("size", [-1, 1.5, True, "4"])
def test_invalid_size_is_refused(size) -> None:
    with pytest.raises(ValueError, match=f"bytes_per_pack={size!r} is not a valid size"):
        sg.CommunicationOptions(bytes_per_pack=size)


@pytest.mark.parametrize("seconds", [-1, True, "4"])
def test_invalid_time_limit_is_refused(seconds) -> None:
    with pytest.raises(ValueError, match=f"timeout_seconds={seconds!r} is not a valid time limit"):
        sg.CommunicationOptions(timeout_seconds=seconds)


@pytest.mark.parametrize("name", ["STAR", 3, None])
def test_unknown_implementation_is_refused(name) -> None:
    with pytest.raises(
        ValueError, match=f"implementation={name!r} is not a known algorithm(?s:.)*AUTO, RING"
    ):
        sg.CommunicationOptions(implementation=name)


def test_gradients_in_half_width_are_an_option() -> None:
    assert sg.CommunicationOptions().reduction_dtype is None
    assert sg.CommunicationOptions(reduction_dtype="bfloat16").reduction_dtype == "bfloat16"
    with pytest.raises(ValueError, match="reduction_dtype='int8' is not supported"):
        sg.CommunicationOptions(reduction_dtype="int8")


def test_hints_are_options_that_leave_the_algorithm_open() -> None:
    hints = sg.CollectiveHints(bytes_per_pack=8, timeout_seconds=3.0)
    assert isinstance(hints, sg.CommunicationOptions)
    assert (hints.bytes_per_pack, hints.timeout_seconds) == (8, 3.0)
    assert hints.implementation is sg.CollectiveCommunication.AUTO
    with pytest.raises(TypeError, match="implementation"):
        sg.CollectiveHints(implementation="RING")
    with pytest.raises(ValueError, match="bytes_per_pack=-1 is not a valid size"):
        sg.CollectiveHints(-1)
