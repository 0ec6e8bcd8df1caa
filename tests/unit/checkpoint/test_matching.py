"""Save and keep policies."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any as MatchingAny

import keras
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import stratagem as sg
from stratagem.checkpoint.policies import (
    Any,
    KeepEveryHours,
    KeepLatest,
    Moment,
    RetainedCheckpoint,
    SaveEverySeconds,
    SaveEverySteps,
)
from stratagem.checkpoint.preemption import RunCalls, restore_latest
from stratagem.checkpoint.restoring import (
    call_after,
    when_initialized,
)

TIMES_H = st.lists(st.floats(0, 100), min_size=1, max_size=30).map(sorted)


@given(st.integers(0, 20), st.floats(0, 20), st.integers(1, 20), st.floats(0.1, 20))
def test_saves_when_enough_steps_or_seconds_have_passed(
    steps: int, seconds: float, every: int, every_s: float
) -> None:
    now = Moment(step=50 + steps, time_s=seconds, saved_step=50, saved_time_s=0.0)
    due = steps >= every, seconds >= every_s
    policies = SaveEverySteps(every), SaveEverySeconds(every_s)
    assert tuple(one.is_due(now) for one in policies) == due
    assert Any(*policies).is_due(now) == any(due)


@given(TIMES_H, st.integers(1, 40), st.floats(0.01, 50))
def test_retained_checkpoints(times_h: list[float], count: int, hours: float) -> None:
    kept = [RetainedCheckpoint(number, time_h * 3600) for number, time_h in enumerate(times_h, 1)]
    latest, spaced = KeepLatest(count).keeps(kept), KeepEveryHours(hours).keeps(kept)

    assert latest == set(range(max(len(kept) - count, 0) + 1, len(kept) + 1))
    assert 1 in spaced
    spaced_s = [one.time_s for one in kept if one.number in spaced]
    assert all(b - a >= hours * 3600 for a, b in itertools.pairwise(spaced_s))
    for one in kept:  # whatever was left out is too near to one that was kept before it
        last_s = max(s for s in spaced_s if s <= one.time_s)
        assert one.number in spaced or one.time_s - last_s < hours * 3600
    assert Any(KeepLatest(count), KeepEveryHours(hours)).keeps(kept) == latest | spaced


@pytest.mark.parametrize("value", [0, -1, -0.1, 1.5, float("nan"), True, "3", None])
def test_numbers_of_policies_are_positive(value) -> None:
    is_whole = value is None or (isinstance(value, int) and value is not True)
    error = ValueError if is_whole else TypeError
    for policy in (SaveEverySteps, KeepLatest):
        with pytest.raises(error, match=r"received(?s:.)*an integer of at least 1"):
            policy(value)
    if value != 1.5:
        for policy in (SaveEverySeconds, KeepEveryHours):
            error = ValueError if is_whole or isinstance(value, float) else TypeError
            with pytest.raises(error, match="a number above 0"):
                policy(value)


@pytest.mark.parametrize("policies", [(), (KeepLatest(1), SaveEverySteps(1)), (3,)])
def test_any_takes_policies_of_one_kind(policies) -> None:
    with pytest.raises(ValueError, match="mixes kinds of policies or is empty"):
        Any(*policies)
    both = Any(KeepLatest(3), KeepEveryHours(1.0))
    assert {both: 1}[Any(KeepLatest(3), KeepEveryHours(1.0))] == 1
    assert both != Any(KeepLatest(3))
    assert repr(both) == "Any(KeepLatest(count=3), KeepEveryHours(hours=1.0))"


# Actions after a method of one object, until they are done, and after first values.


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
    assert (copy.deepcopy(owner).build(), seen) == (1, [])  # a copy has no action
    assert [owner.build(2), owner.build(by=3), owner.build()] == [2, 5, 6]
    assert seen == [2, 5]
    assert other.build() == 1
    assert "build" not in vars(owner), "the method of the class is there again"


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


# Variables are matched to arrays by name in dicts, and by path and shape in models.


def variables(**values: MatchingAny) -> dict[str, MatchingAny]:
    return {
        name.replace("__", "/"): keras.Variable(np.asarray(value, "float32"), name="v")
        for name, value in values.items()
    }


def test_values_are_found_by_name_in_any_order_and_others_refused(tmp_path) -> None:
    with sg.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        saved = variables(a__kernel=[1.0, 2.0], a__bias=3.0, b=4.0)
    path = sg.train.Checkpoint(model=saved).write(tmp_path / "ckpt")
    some = variables(b=0.0, a__kernel=[0.0, 0.0])
    sg.train.Checkpoint(model=some).read(path)
    assert {name: one.value.tolist() for name, one in some.items()} == {
        "b": 4.0,
        "a/kernel": [1.0, 2.0],
    }
    for other, words in (  # as many, which for a layer would do; and another shape
        (
            variables(a__kernel=[5.0, 5.0], a__bias=5.0, c=5.0),
            r"Not in the checkpoint: c\. Only there: b",
        ),
        (
            variables(a__kernel=5.0, b=5.0),
            r"model/a/kernel.* has shape \(\) here but \(2,\) in .*ckpt",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            sg.train.Checkpoint(model=other).read(path)
        assert all((np.asarray(one.value) == 5).all() for one in other.values())


# Step count of a handler: saved with each checkpoint, and restored with the latest.


def manager_of(folder) -> sg.train.CheckpointManager:
    checkpoint = sg.train.Checkpoint(value=sg.Variable(0.0))
    return sg.train.CheckpointManager(checkpoint, folder, max_to_keep=3)


def test_count_is_restored_with_the_latest_checkpoint_for_the_next_handler(tmp_path) -> None:
    manager, earlier, later = manager_of(tmp_path), RunCalls(), RunCalls()
    assert restore_latest(manager, earlier) is None
    earlier.count = 4
    manager.save()
    restore_latest(manager, later)
    assert later.count == 4
    later.count = 6
    latest = manager.save()
    again = RunCalls()
    assert restore_latest(manager_of(tmp_path), again) == latest
    assert (again.count, earlier.count) == (6, 4)
    manager_of(tmp_path).save()  # without a count, which is left as it is
    restore_latest(manager_of(tmp_path), again)
    assert again.count == 6


# Reading arrays of a checkpoint by name.


def test_arrays_are_listed_and_read_by_name(tmp_path: Path) -> None:
    table = np.arange(6, dtype="float32").reshape(2, 3)
    checkpoint = sg.train.Checkpoint(
        table=sg.Variable(table), state={"w": [np.zeros((0, 2), "int8")], "n": 3}
    )
    checkpoint.save(tmp_path / "ckpt")
    checkpoint.table.assign(table + 1)
    newest = checkpoint.save(tmp_path / "ckpt")
    for place in (tmp_path, newest):
        assert sg.train.list_variables(place) == [
            ("save_counter/value", []),
            ("state/n", []),
            ("state/w/0", [0, 2]),
            ("table/value", [2, 3]),
        ]
        np.testing.assert_array_equal(sg.train.load_variable(place, "table/value"), table + 1)
    reader = sg.train.load_checkpoint(newest)
    assert reader.get_variable_to_dtype_map()["state/w/0"] == "int8"
    assert reader.get_tensor("state/n").item() == 3
    assert reader.get_tensor("state/w/0").shape == (0, 2)
    assert [reader.has_tensor(name) for name in ("state/n", "n")] == [True, False]
    with pytest.raises(sg.errors.NotFoundError, match="holds no array 'n'"):
        reader.get_tensor("n")
    with pytest.raises(sg.errors.NotFoundError, match="does not exist"):
        sg.train.load_checkpoint(tmp_path / "other" / "ckpt-1")
