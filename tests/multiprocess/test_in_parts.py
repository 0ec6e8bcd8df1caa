"""State in parts over the devices of several processes: the numbers of copies, in less memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.multiprocess.cluster import PROGRAMS, run_alone, run_cluster

_PROGRAM = str(PROGRAMS / "in_parts.py")

# Of what is kept for the model of the program, weights and what Adam keeps alike.
_TABLE_SHARE = 8192 * 16 / (8192 * 16 + 49 * 64 + 4 * 64 + 65)


def _trained(
    folder: Path, kept: str, num_devices: int, *how: str, **variables: str
) -> list[dict[str, Any]]:
    """What two processes saw, of as many devices each; without parts one process of all devices."""
    folder.mkdir(parents=True)
    if kept == "none":
        every = [run_alone([_PROGRAM, str(2 * num_devices), kept, str(folder), *how])]
    else:
        command = [_PROGRAM, str(num_devices), kept, str(folder), *how]
        every = run_cluster(command, 2, **variables)
    for ended in every:
        assert ended.code == 0, ended.errors
    return [dict(np.load(folder / f"process-{rank}.npz")) for rank in range(len(every))]


def _assert_like(one: dict[str, Any], of_copies: dict[str, Any], share: float) -> None:
    """`share` is what of the memory of copies a device needs."""
    assert one.keys() == of_copies.keys()
    assert one["held"] == pytest.approx(of_copies["held"] * share, rel=0.02)
    for name, value in of_copies.items():
        if name != "held":
            np.testing.assert_allclose(one[name], value, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.slow
def test_processes_train_to_what_copies_do(tmp_path: Path) -> None:
    """90 examples in batches of 32."""
    (of_copies,) = _trained(tmp_path / "copies", "none", 1, "short")
    for one in _trained(tmp_path / "parts", "all", 1, "short"):
        _assert_like(one, of_copies, 1 / 2)


@pytest.mark.slow
def test_hosts_of_a_tpu_train_to_what_copies_do(tmp_path: Path) -> None:
    """CPU devices stand for its chips."""
    (of_copies,) = _trained(tmp_path / "copies", "none", 2, "short")
    tpu = {"STRATAGEM_TPU_PLATFORM": "cpu"}
    for one in _trained(tmp_path / "parts", "all", 2, "short", **tpu):
        _assert_like(one, of_copies, 1 / 4)


@pytest.mark.slow
def test_each_process_has_a_copy(tmp_path: Path) -> None:
    (of_copies,) = _trained(tmp_path / "copies", "none", 2)
    for one in _trained(tmp_path / "parts", "all/2", 2):
        _assert_like(one, of_copies, 1 / 2)
        for name in [name for name in one if name.startswith("went on")]:
            restored = one[f"restored and {name}"]
            np.testing.assert_allclose(restored, one[name], rtol=1e-6, atol=1e-6, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("num_devices", [1, 2])
def test_state_is_saved_restored_and_gone_on_from(num_devices: int, tmp_path: Path) -> None:
    (of_copies,) = _trained(tmp_path / "copies", "none", num_devices)
    count = 2 * num_devices
    # Two thirds are Adam's.
    shares = {"all": 1 / count, "optimizer": (1 + 2 / count) / 3}
    shares |= dict.fromkeys(["sharded", "pinned_host"], _TABLE_SHARE / count + 1 - _TABLE_SHARE)
    for kept, share in shares.items():
        for one in _trained(tmp_path / kept, kept, num_devices):
            _assert_like(one, of_copies, share)
            for name in [name for name in one if name.startswith("went on")]:
                restored = one[f"restored and {name}"]
                np.testing.assert_allclose(restored, one[name], rtol=1e-6, atol=1e-6, err_msg=name)
            np.testing.assert_allclose(one["loaded"], one["predict"], atol=1e-6)
            np.testing.assert_allclose(one["weights of the last epoch"], one["predict"], atol=1e-6)
