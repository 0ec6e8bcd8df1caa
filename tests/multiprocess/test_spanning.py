"""Replicas that span processes: the numbers of one process with all devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.multiprocess.cluster import PROGRAMS, run_alone, run_cluster

_PROGRAM = str(PROGRAMS / "spanning.py")
_NUM_DEVICES = 8


def _trained(
    folder: Path,
    num_processes: int,
    size: int,
    kind: str,
    *how: str,
    num_devices: int = 0,
    **variables: str,
) -> list[dict[str, Any]]:
    """Returns what each process saw; replicas have `size` devices."""
    folder.mkdir(parents=True)
    num_devices = num_devices or _NUM_DEVICES // num_processes
    command = [_PROGRAM, str(num_devices), str(size), kind, str(folder), *how]
    if num_processes == 1:
        every = [run_alone(command)]
    else:
        every = run_cluster(command, num_processes, **variables)
    for ended in every:
        assert ended.code == 0, ended.errors
    return [dict(np.load(folder / f"process-{rank}.npz")) for rank in range(len(every))]


def _assert_like(one: dict[str, Any], expected: dict[str, Any]) -> None:
    assert one.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(one[name], value, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.slow
def test_loop_on_one_replica_of_two_processes(tmp_path: Path) -> None:
    """Each process has one device; NumPy computes the same on one."""
    both = _trained(tmp_path / "together", 2, 2, "layout", "loop", num_devices=1)
    x = np.random.default_rng(0).integers(0, 16384, (42, 8), dtype="int32")
    weight, losses = np.ones((8, 64)), []

    def step(batch: Any) -> float:
        nonlocal weight
        mean = np.mean(batch / 16384 @ weight)
        weight = weight - 0.01 * mean * weight
        return mean

    for examples in (x, x[:36]):
        for start in range(0, len(examples), 16):
            batch = examples[start : start + 16]
            losses += [step(batch), batch.sum(), step(batch)]
    of_steps = [step(x[start : start + 16]) for start in (0, 16, 32)]
    for one in both:
        assert one["pipelines"] == 1
        assert one["ids"] == [1]
        np.testing.assert_allclose([*one["dataset losses"], *one["function losses"]], losses, 1e-5)
        np.testing.assert_allclose(one["run_steps"], of_steps, 1e-5)
        np.testing.assert_allclose(one["weight"], weight, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_processes", "size", "kind"), [(2, 8, "layout"), (4, 4, "layout"), (4, 4, "all")]
)
def test_processes_of_a_replica_train_as_one(num_processes, size, kind, tmp_path: Path) -> None:
    """Steps, loops, files and checkpoints; 42 examples in batches of 16."""
    (alone,) = _trained(tmp_path / "alone", 1, size, kind)
    assert alone["pipelines"] == 1
    for one in _trained(tmp_path / "together", num_processes, size, kind):
        assert one.pop("pipelines") == _NUM_DEVICES // size
        _assert_like(one, {name: value for name, value in alone.items() if name != "pipelines"})
        for name in [name for name in one if name.startswith("went on")]:
            for way in ("restored and", "back and"):
                np.testing.assert_allclose(one[f"{way} {name}"], one[name], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_processes", "size", "variables"),
    [(2, 8, {}), (2, 4, {}), (2, 8, {"STRATAGEM_TPU_PLATFORM": "cpu"})],
)
def test_sequences_are_split_over_processes(num_processes, size, variables, tmp_path: Path) -> None:
    """CPU devices also stand for the chips of two hosts of a TPU."""
    (alone,) = _trained(tmp_path / "alone", 1, size, "sequence", "fit")
    together = _trained(tmp_path / "together", num_processes, size, "sequence", "fit", **variables)
    for one in together:
        _assert_like(one, alone)
