"""State in parts over the devices of several processes: the numbers of copies, in less memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.multiprocess.cluster import PROGRAMS, assert_like, completed, written

_PROGRAM = str(PROGRAMS / "in_parts.py")

# Of what is kept for the model of the program, weights and what Adam keeps alike.
_TABLE_SHARE = 8192 * 16 / (8192 * 16 + 49 * 64 + 4 * 64 + 65)


def _trained(
    folder: Path, kept: str, num_devices: int, *how: str, **variables: str
) -> list[dict[str, Any]]:
    """What two processes saw, of as many devices each; without parts one process of all devices."""
    folder.mkdir(parents=True)
    count = 0 if kept == "none" else 2
    own_devices = num_devices if count else 2 * num_devices
    completed([_PROGRAM, str(own_devices), kept, str(folder), *how], count, **variables)
    return written(folder, count or 1)


def _assert_like(one: dict[str, Any], of_copies: dict[str, Any], share: float) -> None:
    """`share` is what of the memory of copies a device needs."""
    assert one["held"] == pytest.approx(of_copies["held"] * share, rel=0.02)
    assert_like({**one, "held": of_copies["held"]}, of_copies)


@pytest.mark.slow
def test_hosts_of_a_tpu_train_to_what_copies_do(tmp_path: Path) -> None:
    """CPU devices stand for its chips."""
    (of_copies,) = _trained(tmp_path / "copies", "none", 2, "short")
    tpu = {"STRATAGEM_TPU_PLATFORM": "cpu"}
    for one in _trained(tmp_path / "parts", "all", 2, "short", **tpu):
        _assert_like(one, of_copies, 1 / 4)


@pytest.mark.slow
@pytest.mark.parametrize("num_devices", [1, 2])
def test_state_is_saved_restored_and_gone_on_from(num_devices: int, tmp_path: Path) -> None:
    (of_copies,) = _trained(tmp_path / "copies", "none", num_devices)
    count = 2 * num_devices
    # Two thirds are Adam's.
    shares = {"all": 1 / count, "optimizer": (1 + 2 / count) / 3}
    if num_devices == 2:  # each process has a copy
        shares["all/2"] = 1 / 2
    shares |= dict.fromkeys(["sharded", "pinned_host"], _TABLE_SHARE / count + 1 - _TABLE_SHARE)
    for kept, share in shares.items():
        for one in _trained(tmp_path / kept, kept, num_devices):
            _assert_like(one, of_copies, share)
            for name in [name for name in one if name.startswith("went on")]:
                restored = one[f"restored and {name}"]
                np.testing.assert_allclose(restored, one[name], rtol=1e-6, atol=1e-6, err_msg=name)
            np.testing.assert_allclose(one["loaded"], one["predict"], atol=1e-6)
            np.testing.assert_allclose(one["weights of the last epoch"], one["predict"], atol=1e-6)
