"""What users define comes back from workers as it was, wherever it is defined."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

_PROGRAM = Path(__file__).with_name("user_kinds.py")
_IMPORTING = "import sys, own_kinds\nif __name__ == '__main__':\n    own_kinds.main(sys.argv[1:])\n"
_LIMIT_S = 900


def _run(place: str, folder: Path) -> dict[str, Any]:
    """Runs the program as a script, as a module that a script imports, or in a notebook's way."""
    command, source = [sys.executable, str(_PROGRAM)], None
    if place == "module":
        shutil.copy(_PROGRAM, folder / "own_kinds.py")
        (folder / "main.py").write_text(_IMPORTING)
        command = [sys.executable, str(folder / "main.py")]
    if place == "notebook":  # a main module without a file
        command, source = [sys.executable, "-"], _PROGRAM.read_text()
    done = subprocess.run(
        command,
        input=source,
        env={**os.environ, "JAX_NUM_CPU_DEVICES": "1"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("place", ["script", "module", "notebook"])
def test_kinds_of_users_equal_one_device(tmp_path: Path, place: str) -> None:
    numbers = _run(place, tmp_path)
    expected = numbers.pop("one device")
    assert len(expected) > 10
    for where, measured in numbers.items():
        assert measured.keys() == expected.keys()
        for kind, values in expected.items():
            assert jax.tree.structure(measured[kind]) == jax.tree.structure(values), (where, kind)
            np.testing.assert_allclose(
                np.array(jax.tree.leaves(measured[kind])),
                np.array(jax.tree.leaves(values)),
                rtol=1e-5,
                atol=1e-6,
                err_msg=f"{kind}, {where}",
            )
