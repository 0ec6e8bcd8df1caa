"""Killed members of an elastic group are started again, and join the others in their training."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

from stratagem.observe.events import read_run
from stratagem.observe.goodput import Account, account_for
from tests.multiprocess.cluster import PROGRAMS, addresses, ended, environment
from tests.multiprocess.programs.elastic_data import (
    NUM_BATCHES,
    data,
    make_model,
    random_callbacks,
)

_PROGRAM = str(PROGRAMS / "elastic.py")
_NUM_MEMBERS = 3
_Results = dict[int, np.lib.npyio.NpzFile]


def _start(
    index: int, workers: list[str], arguments: list[str], **variables: str
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, _PROGRAM, *arguments],
        env=environment(index, workers, **variables),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def _train(folder: Path, kind: str, *moments: str) -> _Results:
    """Trains with members that are killed and start again; returns the results of all."""
    folder.mkdir(exist_ok=True)
    arguments = [str(folder), kind, *moments]
    workers = addresses(_NUM_MEMBERS)
    run = {"STRATAGEM_RUN_DIR": str(folder / "run")}
    processes = {index: _start(index, workers, arguments, **run) for index in range(len(workers))}
    killed = [int(one.split(":")[0]) for one in moments if not one.startswith("join")]
    try:
        for index in killed:
            one = ended(processes.pop(index))
            assert one.code == -signal.SIGKILL, one.errors
            again = {"STRATAGEM_RESTART_COUNT": "1", **run}
            processes[index] = _start(index, workers, arguments, **again)
        for process in processes.values():
            one = ended(process)
            assert one.code == 0, one.errors
    finally:
        for process in processes.values():
            process.kill()
            process.communicate()
    return {index: np.load(folder / f"member-{index}.npz") for index in processes}


def _weights(result: np.lib.npyio.NpzFile) -> list[np.ndarray]:
    return [result[f"arr_{place}"] for place in range(4)]


def _check(results: _Results, weights: list[np.ndarray], logs: list[float]) -> None:
    """All have the weights and logs of one device, and the same bits."""
    first = next(iter(results.values()))
    for result in results.values():
        for mine, theirs in zip(_weights(result), _weights(first), strict=True):
            np.testing.assert_array_equal(mine, theirs)
        for mine, wanted in zip(_weights(result), weights, strict=True):
            np.testing.assert_allclose(mine, wanted, atol=2e-5)
        np.testing.assert_allclose(result["losses"], logs, rtol=1e-4)


def _reference() -> tuple[list[np.ndarray], list[float]]:
    """Returns the weights and logs of Keras alone, on shuffled data."""
    model = make_model()
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    x, y = data()
    keras.utils.set_random_seed(8)
    history = model.fit(x, y, 32, 4, verbose=0, callbacks=random_callbacks()).history
    logs = [*history["loss"], *history["mae"], *history["learning_rate"]]
    assert len(set(history["learning_rate"])) > 1
    return [np.asarray(variable.value) for variable in model.weights], logs


_EVERYONE = 0b111


@pytest.mark.slow
@pytest.mark.parametrize(
    "moments",
    [
        ("1:8:in", "join:10"),
        ("0:3", "join:5", "2:13", "join:16"),
    ],
    ids=str,
)
def test_fit_of_one_that_is_started_again_continues_with_the_others(
    tmp_path: Path, moments
) -> None:
    results = _train(tmp_path, "random", *moments)
    assert sorted(results) == [0, 1, 2]
    _check(results, *_reference())
    stayed = next(result for result in results.values() if len(result["members"]) == 24)
    assert stayed["members"][-1] == _EVERYONE
    assert len(set(stayed["members"].tolist())) == 1 + len(moments) // 2
    lost = [f"worker {one.split(':')[0]}" for one in moments if not one.startswith("join")]
    _check_account(account_for(read_run(tmp_path / "run")), lost)


def _check_account(account: Account, lost: list[str]) -> None:
    """Each loss and each join is there once, with its pause, and none is a failure."""
    begin, *changes = account.member_changes
    assert (begin.cause, begin.num_members) == (None, 3)
    assert [change.lost for change in changes[::2]] == [(task,) for task in lost]
    assert [change.joined for change in changes[1::2]] == [(task,) for task in lost]
    assert [change.num_members for change in changes] == [2, 3] * len(lost)
    for cause, found in (("members lost", changes[::2]), ("members joined", changes[1::2])):
        pauses_s = [change.pause_s for change in found]
        assert all(pause_s is not None and pause_s >= 0 for pause_s in pauses_s)
        assert account.time_s[cause] <= sum(pause_s or 0.0 for pause_s in pauses_s) + 1e-6
    assert (account.failures, account.num_repeated) == ((), 0)
    assert account.num_steps == 4 * NUM_BATCHES
    assert account.is_over


@pytest.mark.slow
def test_one_that_cannot_compile_its_step_before_it_joins(tmp_path: Path) -> None:
    """It has no batch to compile for, so it sees its variables for the first time in the step."""
    whole = _train(tmp_path / "whole", "sequence")
    results = _train(tmp_path / "again", "sequence", "1:3:in", "join:5")
    assert sorted(results) == [0, 1, 2]
    _check(results, _weights(whole[0]), whole[0]["losses"].tolist())
    assert results[0]["members"].tolist().count(0b101) > 0


@pytest.mark.slow
def test_a_loop_of_one_that_is_started_again_continues_with_the_others(tmp_path: Path) -> None:
    whole = _train(tmp_path / "whole", "counted")
    results = _train(tmp_path / "again", "counted", "2:4:in", "join:6")
    _check(results, _weights(whole[0]), whole[0]["losses"].tolist())


@pytest.mark.slow
def test_a_replay_of_the_participants_gives_the_same_bits(tmp_path: Path) -> None:
    """A member is killed and joins at steps that the log of the first run shows."""
    first = _train(tmp_path / "first", "random", "1:7:in", "join:9")
    log = first[0]["members"].tolist()
    assert 0b101 in log
    killed_at = log.index(0b101)
    joined_at = killed_at + log[killed_at:].index(0b111)
    again = _train(tmp_path / "again", "random", f"1:{killed_at}", f"join:{joined_at - 2}")
    assert again[0]["members"].tolist() == log
    for mine, theirs in zip(_weights(first[0]), _weights(again[1]), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    np.testing.assert_array_equal(first[2]["losses"], again[1]["losses"])
