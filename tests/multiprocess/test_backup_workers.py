"""A worker is late in some steps; the weights are those of the rows of the others."""

from __future__ import annotations

import contextlib
import itertools
import signal
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

from stratagem.errors import NOT_NEEDED
from stratagem.input.batches import split_lengths
from tests.multiprocess.cluster import PROGRAMS, addresses, ended, environment, run_cluster

pytestmark = pytest.mark.slow

_PROGRAM = str(PROGRAMS / "backup_workers.py")
_NUM_MEMBERS = 3
_BATCH, _NUM_BATCHES, _NUM_EPOCHS = 32, 12, 2
_Results = dict[int, np.lib.npyio.NpzFile]


def _train(folder: Path, kind: str, *moments: str) -> _Results:
    """Returns the results of the members that are left."""
    killed = {int(one.split(":")[0]) for one in moments if one.endswith("killed")}
    ended = run_cluster([_PROGRAM, str(folder), kind, *moments], _NUM_MEMBERS)
    for member, one in enumerate(ended):
        assert one.code == (-signal.SIGKILL if member in killed else 0), one.errors
    return {
        member: np.load(folder / f"member-{member}.npz")
        for member in range(_NUM_MEMBERS)
        if member not in killed
    }


def _rows(number: int, participants: list[int], members: list[int]) -> np.ndarray:
    """Returns the places in the data of the rows of the participants of a step."""
    first = (number % _NUM_BATCHES) * _BATCH
    count = min(_BATCH, _BATCH * _NUM_BATCHES - 5 - first)
    size, lengths = split_lengths(count, len(members))
    lengths = lengths or (size,) * len(members)
    parts = [
        np.arange(first + rank * size, first + rank * size + lengths[rank])
        for rank, member in enumerate(members)
        if member in participants
    ]
    return np.concatenate(parts)


def _data_and_model() -> tuple[np.ndarray, np.ndarray, keras.Model]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(_BATCH * _NUM_BATCHES - 5, 8)).astype(np.float32)
    y = (x[:, :1] * x[:, 1:2]).astype(np.float32)
    keras.utils.set_random_seed(7)
    model = keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(1)]
    )
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return x, y, model


def _replayed(log: list[int], members_of: list[list[int]]) -> tuple[list[np.ndarray], np.ndarray]:
    """Returns the weights of one device from the rows of the participants, and each step's loss.

    The second result has columns loss, mean absolute error and number of rows.
    """
    x, y, model = _data_and_model()
    steps: list[tuple[float, ...]] = []
    for number, (bits, members) in enumerate(zip(log, members_of, strict=True)):
        rows = _rows(number, [one for one in members if bits >> one & 1], members)
        model.reset_metrics()
        loss, error = model.train_on_batch(x[rows], y[rows])
        steps.append((float(loss), float(error), float(len(rows))))
    return [np.asarray(variable.value) for variable in model.weights], np.array(steps)


def _weights(result: np.lib.npyio.NpzFile) -> list[np.ndarray]:
    return [result[f"arr_{place}"] for place in range(4)]


def _members_of(result: np.lib.npyio.NpzFile) -> list[list[int]]:
    """Returns the members at each step, whether or not they took part."""
    return [
        [one for one in range(_NUM_MEMBERS) if members >> one & 1]
        for members, _ in result["steps"].tolist()
    ]


def _check(results: _Results, members_of: list[list[int]]) -> np.ndarray:
    """Checks the weights; returns the steps of the replay."""
    first = next(iter(results.values()))
    log = first["participants"].tolist()
    weights, steps = _replayed(log, members_of)
    for result in results.values():
        np.testing.assert_array_equal(result["participants"], log)
        for mine, others, wanted in zip(_weights(result), _weights(first), weights, strict=True):
            np.testing.assert_array_equal(mine, others)
            np.testing.assert_allclose(mine, wanted, atol=2e-5)
    return steps


def test_fit_goes_on_without_a_late_worker(tmp_path: Path) -> None:
    results = _train(tmp_path, "fit", "1:5:computed", "0:16:late")
    steps = _check(results, [[0, 1, 2]] * (_NUM_EPOCHS * _NUM_BATCHES))
    for late in (0, 1):
        assert any(not bits >> late & 1 for bits in results[2]["participants"])
    assert results[0]["followed"] > 0
    means = [
        np.average(epoch[:, column], weights=epoch[:, 2])
        for column in (0, 1)
        for epoch in np.split(steps, _NUM_EPOCHS)
    ]
    for result in results.values():
        np.testing.assert_allclose(result["losses"][:4], means, rtol=1e-4)
        np.testing.assert_allclose(result["losses"], results[0]["losses"], rtol=1e-6)


def test_results_of_a_loop_are_those_of_the_participants(tmp_path: Path) -> None:
    results = _train(tmp_path, "loop", "2:7:computed", "1:13:late")
    steps = _check(results, [[0, 1, 2]] * (_NUM_EPOCHS * _NUM_BATCHES))
    for result in results.values():
        losses, rows = result["losses"].reshape(-1, 2).T
        np.testing.assert_allclose(losses, steps[:, 0], rtol=1e-4)
        np.testing.assert_array_equal(rows, steps[:, 2])


@pytest.mark.parametrize("killed", [0, 1])
def test_a_participant_is_killed_while_another_worker_is_late(tmp_path: Path, killed) -> None:
    """Worker 2 lacks steps when the one that sends them, or another, is lost."""
    results = _train(tmp_path, "fit", "2:6:late", f"{killed}:9:killed")
    left = [member for member in range(3) if member != killed]
    log = results[2]["participants"].tolist()
    members_of = _members_of(results[2])
    assert members_of[8:10] == [[0, 1, 2], left]
    _check(results, members_of)
    assert any(not bits & 0b100 for bits in log)


def _replayed_in_parts(steps: list[tuple[int, int]]) -> list[np.ndarray]:
    """Returns the weights of one device where a member has at most a third of a batch in a step."""
    x, y, model = _data_and_model()
    batches = itertools.cycle(range(0, len(x), _BATCH))
    first = end = last = 0
    for members, participants in steps:
        if end == last:  # the batch is complete
            first = end = next(batches)
            last = min(len(x), first + _BATCH)
        ids = [one for one in range(_NUM_MEMBERS) if members >> one & 1]
        most = -((first - last) // _NUM_MEMBERS)  # rounded up
        start, end = end, min(last, end + most * len(ids))
        size, lengths = split_lengths(end - start, len(ids))
        rows = [
            np.arange(start + rank * size, start + rank * size + (lengths or [size] * 3)[rank])
            for rank, one in enumerate(ids)
            if participants >> one & 1
        ]
        model.train_on_batch(x[np.concatenate(rows)], y[np.concatenate(rows)])
    assert end == last == len(x)
    return [np.asarray(variable.value) for variable in model.weights]


def test_rows_of_a_worker_stay_with_backup_workers(tmp_path: Path) -> None:
    """Worker 1 is lost while worker 2 lacks steps; then two take a batch in two steps."""
    results = _train(tmp_path, "worker", "2:6:late", "1:9:killed", "0:16:late")
    steps = results[0]["steps"].tolist()
    assert any(members == 0b101 != participants for members, participants in steps)
    wanted = _replayed_in_parts(steps)
    for result in results.values():
        assert result["steps"].tolist() == steps
        for mine, one in zip(_weights(result), wanted, strict=True):
            np.testing.assert_allclose(mine, one, atol=2e-5)


def test_a_worker_that_starts_again_ends_and_the_others_go_on(tmp_path: Path) -> None:
    workers = addresses(_NUM_MEMBERS)
    moments = ["1:5:killed", "2:5:late", "0:8:held"]  # step 5 needs both of the others

    def start(index: int) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, _PROGRAM, str(tmp_path), "fit", *moments],
            env=environment(index, workers),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    with contextlib.ExitStack() as stack:
        processes = [start(index) for index in range(_NUM_MEMBERS)]
        for process in processes:
            stack.callback(process.communicate)
            stack.callback(process.kill)
        assert ended(processes[1]).code == -signal.SIGKILL
        again = ended(start(1))
        assert again.code == NOT_NEEDED, again.errors
        assert "while the others train with num_backup_workers=1" in again.errors
        (tmp_path / "go").touch()
        for index in (0, 2):
            one = ended(processes[index])
            assert one.code == 0, one.errors
    results = {index: np.load(tmp_path / f"member-{index}.npz") for index in (0, 2)}
    members_of = _members_of(results[0])
    assert members_of[4:6] == [[0, 1, 2], [0, 2]]
    _check(results, members_of)
