"""Actions after a method of one object, until they are done, and after first values."""

from __future__ import annotations

import copy

import jax
import keras
import numpy as np

from stratagem.checkpoint.deferred_restore import (
    call_after,
    infers_shapes,
    is_in_step,
    layers_of,
    when_initialized,
)


class Owner:
    def __init__(self) -> None:
        self.num_calls = 0

    def build(self, by: int = 1) -> int:
        """Counts."""
        self.num_calls += by
        return self.num_calls


def test_action_runs_after_each_call_until_it_is_done() -> None:
    owner, other, seen = Owner(), Owner(), []

    def action() -> bool:
        seen.append(owner.num_calls)
        return len(seen) == 2

    call_after(owner, "build", action)  # pyright: ignore[reportArgumentType]
    assert owner.build.__doc__ == "Counts."
    assert [owner.build(2), owner.build(by=3), owner.build()] == [2, 5, 6]
    assert seen == [2, 5]
    assert other.build() == 1
    assert "build" not in vars(owner), "the method of the class is there again"


def test_two_actions_run_and_both_are_removed() -> None:
    owner, seen = Owner(), []
    for name in ("first", "second"):
        call_after(owner, "build", lambda name=name: bool(seen.append(name)) or True)  # pyright: ignore[reportArgumentType]
    for _ in range(3):
        owner.build()
    assert sorted(seen) == ["first", "second"]
    assert owner.num_calls == 3


def test_copy_of_an_object_has_the_method_without_the_action() -> None:
    owner, seen = Owner(), []
    call_after(owner, "build", lambda: bool(seen.append(1)))  # pyright: ignore[reportArgumentType]
    copy.deepcopy(owner).build()
    assert seen == []


def test_action_waits_for_the_first_value_of_all_variables() -> None:
    done = []
    with keras.StatelessScope():
        first, second = (keras.Variable("ones", shape=(2,)) for _ in range(2))
        when_initialized([first, second], lambda: done.append(1))
        assert done == []
    assert done == [1]
    np.testing.assert_array_equal(first.value, [1, 1])
    when_initialized([first, second], lambda: done.append(2))
    when_initialized([], lambda: done.append(3))
    assert done == [1, 2, 3]


def test_steps_and_layers_are_recognized() -> None:
    model = keras.Sequential([keras.layers.Dense(2), keras.Sequential([keras.layers.Dropout(0.5)])])
    kinds = [type(layer).__name__ for layer in layers_of(model)]
    assert kinds.count("Dense") == kinds.count("Dropout") == 1
    assert not is_in_step()
    assert not infers_shapes()
    inside = []
    jax.eval_shape(lambda x: (inside.append(is_in_step()), x)[1], np.ones(1))
    with keras.StatelessScope():
        inside.append(is_in_step())
    assert inside == [True, True]
