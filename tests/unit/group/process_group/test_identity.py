"""Identity of a process: its label and the size of its group."""

from __future__ import annotations

import dataclasses

import pytest

from stratagem.group.current import Identity


def test_label_is_that_of_the_process() -> None:
    identity = Identity(1, ("chief", "worker 0", "worker 1"), "10.0.0.1", 2222)
    assert (identity.label, identity.num_processes) == ("worker 0", 3)


def test_values_that_must_agree_are_not_shared_between_identities() -> None:
    first, second = (Identity(0, ("a",), "h", 1) for _ in range(2))
    assert first.same == {}
    assert first.same is not second.same
    assert first == second
    assert first != Identity(0, ("a",), "h", 1, {"version": 2})


def test_identity_is_fixed_and_a_process_outside_the_group_has_no_label() -> None:
    identity = Identity(2, ("a", "b"), "h", 1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        identity.port = 2
    with pytest.raises(IndexError):
        _ = identity.label
