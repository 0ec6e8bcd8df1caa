"""What was saved under one strategy goes on under every other."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.multiprocess.cluster import PROGRAMS, run_alone, run_cluster

_PROGRAM = str(PROGRAMS / "crossing.py")
_PLACES = ("none", "one_device", "mirrored_2", "mirrored_3", "workers_2")


def run(place: str, task: str, folder: Path) -> None:
    command = [_PROGRAM, place, task, str(folder)]
    ended = (
        run_cluster(command, 2)
        if place == "workers_2"
        else [run_alone(command, XLA_FLAGS="--xla_force_host_platform_device_count=3")]
    )
    for one in ended:
        assert one.code == 0, one.errors


@pytest.mark.slow
def test_every_strategy_goes_on_from_what_every_other_has_saved(tmp_path: Path) -> None:
    for place in _PLACES:
        run(place, "save", tmp_path)
    for place in _PLACES:
        run(place, "restore", tmp_path)
    for origin in _PLACES:
        wanted = dict(np.load(tmp_path / f"{origin}.npz"))
        assert (wanted["total"], wanted["mean"]) == (240.0, 20.0)
        assert len(wanted["losses"]) == 10
        for place in _PLACES:
            got = dict(np.load(tmp_path / f"{place}-from-{origin}.npz"))
            for name, value in wanted.items():
                np.testing.assert_allclose(
                    got[name], value, rtol=2e-5, atol=1e-6, err_msg=f"{name}: {origin} -> {place}"
                )


@pytest.mark.slow
def test_two_workers_go_on_from_what_one_process_has_saved(tmp_path: Path) -> None:
    run("one_device", "save", tmp_path)
    run("workers_2", "restore", tmp_path)
    wanted = dict(np.load(tmp_path / "one_device.npz"))
    got = dict(np.load(tmp_path / "workers_2-from-one_device.npz"))
    for name, value in wanted.items():
        np.testing.assert_allclose(got[name], value, rtol=2e-5, atol=1e-6, err_msg=name)
