"""Members of an elastic group are killed; the others end with the weights of one device."""

from __future__ import annotations

import signal
from pathlib import Path

import keras
import numpy as np
import pytest

from tests.multiprocess.cluster import PROGRAMS, run_cluster

_PROGRAM = str(PROGRAMS / "elastic.py")
_NUM_MEMBERS = 3


def _train(folder: Path, kind: str, *moments: str) -> dict[int, np.lib.npyio.NpzFile]:
    """Returns the results of the members that are left."""
    folder.mkdir(exist_ok=True)
    killed = {int(one.split(":")[0]) for one in moments}
    ended = run_cluster([_PROGRAM, str(folder), kind, *moments], _NUM_MEMBERS)
    for member, one in enumerate(ended):
        assert one.code == (-signal.SIGKILL if member in killed else 0), one.errors
    return {
        member: np.load(folder / f"member-{member}.npz")
        for member in range(_NUM_MEMBERS)
        if member not in killed
    }


def _reference() -> tuple[list[np.ndarray], list[float]]:
    """Returns the weights and logs of Keras alone, from the same batches."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(32 * 6 - 5, 8)).astype(np.float32)
    y = (x[:, :1] * x[:, 1:2]).astype(np.float32)
    keras.utils.set_random_seed(7)
    model = keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(1)]
    )
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    history = model.fit(x, y, 32, 2, shuffle=False, verbose=0, validation_data=(x, y)).history
    logs = [*history["loss"], *history["mae"], *history["val_loss"], *history["val_mae"]]
    return [np.asarray(variable.value) for variable in model.weights], logs


def _weights(result: np.lib.npyio.NpzFile) -> list[np.ndarray]:
    return [result[f"arr_{place}"] for place in range(4)]


@pytest.mark.parametrize(
    "moments",
    [
        ("0:3", "2:7:in"),
        pytest.param(("2:0",), marks=pytest.mark.slow),
        # The steps of `predict` begin with 12: rows of one that is lost are computed again.
        pytest.param(("1:5:in", "0:14:in"), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_fit_goes_on_and_ends_where_one_device_does(tmp_path: Path, moments) -> None:
    left = _train(tmp_path, "fit", *moments)
    results = list(left.values())
    weights, logs = _reference()
    parts = [moment.split(":") for moment in moments]
    at_the_end = {*left, *(int(part[0]) for part in parts if int(part[1]) >= 12)}
    for result in results:
        for mine, first in zip(_weights(result), _weights(results[0]), strict=True):
            np.testing.assert_array_equal(mine, first)
        for mine, wanted in zip(_weights(result), weights, strict=True):
            np.testing.assert_allclose(mine, wanted, atol=2e-5)
        np.testing.assert_allclose(result["losses"], logs, rtol=1e-4)
        assert len(result["members"]) == 12
        assert result["members"][-1] == sum(1 << member for member in at_the_end)


@pytest.mark.slow
def test_a_replay_of_the_participants_gives_the_same_bits(tmp_path: Path) -> None:
    """The log of the first run says which processes took part in each step."""
    (one,) = _train(tmp_path / "first", "loop", "2:4:in", "0:9:in").values()
    log = one["members"].tolist()
    ends = {member: sum(bool(step >> member & 1) for step in log) for member in (2, 0)}
    assert 4 <= ends[2] <= 5
    assert 9 <= ends[0] <= 10
    moments = [f"{member}:{step}" for member, step in ends.items()]
    (other,) = _train(tmp_path / "again", "loop", *moments).values()
    np.testing.assert_array_equal(other["members"], log)
    for mine, theirs in zip(_weights(one), _weights(other), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    known = [step for step in range(len(log)) if step + 1 not in ends.values()]
    np.testing.assert_array_equal(one["losses"][known], other["losses"][known])
