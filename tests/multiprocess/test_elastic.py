"""Members of an elastic group are killed; the others end with the weights of one device."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import pytest

from tests.multiprocess.cluster import PROGRAMS, run_cluster
from tests.multiprocess.elastic_reference import reference, weights_of

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
    weights, logs = reference()
    parts = [moment.split(":") for moment in moments]
    at_the_end = {*left, *(int(part[0]) for part in parts if int(part[1]) >= 12)}
    for result in results:
        for mine, first in zip(weights_of(result), weights_of(results[0]), strict=True):
            np.testing.assert_array_equal(mine, first)
        for mine, wanted in zip(weights_of(result), weights, strict=True):
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
    for mine, theirs in zip(weights_of(one), weights_of(other), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    known = [step for step in range(len(log)) if step + 1 not in ends.values()]
    np.testing.assert_array_equal(one["losses"][known], other["losses"][known])
