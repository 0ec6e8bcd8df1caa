"""Step count of a handler: saved with each checkpoint, and restored with the latest."""

from __future__ import annotations

import keras

import stratagem as sg
from stratagem.checkpoint.preemption_handler import RunCalls, is_built, restore_latest


def manager_of(folder) -> sg.train.CheckpointManager:
    checkpoint = sg.train.Checkpoint(value=sg.Variable(0.0))
    return sg.train.CheckpointManager(checkpoint, folder, max_to_keep=3)


def test_count_is_restored_with_the_latest_checkpoint(tmp_path) -> None:
    manager, calls = manager_of(tmp_path), RunCalls()
    assert restore_latest(manager, calls) is None
    for count in (3, 5):
        calls.count = count
        latest = manager.save()
    again = RunCalls()
    assert restore_latest(manager_of(tmp_path), again) == latest
    assert again.count == 5
    assert isinstance(again.get_state(), int)


def test_checkpoint_without_a_count_leaves_it_unchanged(tmp_path) -> None:
    manager = manager_of(tmp_path)
    path = manager.save()
    calls = RunCalls()
    calls.count = 9
    assert restore_latest(manager_of(tmp_path), calls) == path
    assert calls.count == 9


def test_count_of_a_new_handler_takes_the_place_of_an_earlier_one(tmp_path) -> None:
    manager, earlier, later = manager_of(tmp_path), RunCalls(), RunCalls()
    restore_latest(manager, earlier)
    earlier.count = 4
    manager.save()
    restore_latest(manager, later)
    assert later.count == 4
    later.count = 6
    manager.save()
    again = RunCalls()
    restore_latest(manager_of(tmp_path), again)
    assert (again.count, earlier.count) == (6, 4)


def test_checkpoint_is_built_once_all_its_models_are() -> None:
    model = keras.Sequential([keras.layers.Dense(2)])
    checkpoint = sg.train.Checkpoint(model=model)
    assert not is_built(checkpoint)
    model.build((None, 3))
    assert is_built(checkpoint)
