"""Broken environments: `stratagem doctor` names each problem and its fix, and only where it is.

Each environment is made for a process of its own: by mounts, another task, or files that it finds
first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.unit.cli.doctor import environments

pytestmark = pytest.mark.slow

_LIMIT_S = 120


@dataclasses.dataclass(frozen=True)
class Broken:
    """A row: an environment, and the words of its finding and of the fix.

    `level` "error" means exit code 1, "warning" 0. What `needs_mount` cannot be made everywhere.
    """

    make: Callable[[Path], contextlib.AbstractContextManager[environments.Setup]]
    text: tuple[str, ...]
    fix: tuple[str, ...]
    level: str = "error"
    needs_mount: bool = False


def _run(setup: environments.Setup, home: Path) -> tuple[int, list[dict[str, Any]]]:
    variables = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("KERAS_", "JAX_", "XLA_", "RAY_", "STRATAGEM_"))
    }
    extra = setup.variables.get("PYTHONPATH")
    own = {
        "JAX_PLATFORMS": "cpu",
        "HOME": str(home),
        **setup.variables,
        "PYTHONPATH": os.pathsep.join(filter(None, (extra, str(environments.SOURCE)))),
    }
    finished = subprocess.run(
        [*setup.prefix, sys.executable, "-m", "stratagem", "doctor", "--json", *setup.arguments],
        env={**variables, **own},
        cwd=home,
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
    )
    assert finished.returncode in (0, 1), finished.stderr
    printed = json.loads(finished.stdout)
    return finished.returncode, printed if isinstance(printed, list) else printed["findings"]


def _matching(findings: Sequence[Mapping[str, str]], row: Broken) -> list[Mapping[str, str]]:
    return [one for one in findings if all(words in one["text"] for words in row.text)]


_ROWS = {
    "wrong jaxlib stops jax": Broken(
        environments.old_jaxlib,
        ("JAX did not start", "jaxlib"),
        ("pip install --upgrade jax jaxlib",),
    ),
    "small shared memory": Broken(
        environments.of(prefix=environments.mounted("mount -t tmpfs -o size=64k none /dev/shm")),
        ("/dev/shm has 64 KiB",),
        ("--shm-size", "medium: Memory"),
        "warning",
        needs_mount=True,
    ),
    "other settings on another host": Broken(
        lambda _: environments.with_another_task({"JAX_ENABLE_X64": "1"}),
        ("JAX_ENABLE_X64 differs: not set on worker 0; 1 on worker 1",),
        ("alike on all hosts",),
        "warning",
    ),
    "disk full of files": Broken(
        environments.full_of_files,
        ("disk-full-of-files0 has room for", "inodes"),
        ("df -i",),
        needs_mount=True,
    ),
    "read-only compilation cache": Broken(
        environments.read_only_cache,
        ("JAX_COMPILATION_CACHE_DIR cannot be written", "read-only"),
        ("mount it writable",),
        "warning",
        needs_mount=True,
    ),
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Findings of this machine, without anything broken: alone, in a cluster, with another task."""
    home = tmp_path_factory.mktemp("sound")
    cache = home / "cache"
    environments.write_cache(cache)
    variables = {"JAX_COMPILATION_CACHE_DIR": str(cache)}
    _, findings = _run(environments.Setup(variables=variables), home)
    own = {
        "TF_CONFIG": environments.cluster(
            [f"127.0.0.1:{environments.closed_port()}" for _ in range(2)]
        )
    }
    _, in_cluster = _run(environments.Setup(variables=own), home)
    with environments.with_another_task({}) as setup:
        _, together = _run(setup, home)
    assert any("reach each other" in one["text"] for one in together)
    assert any("can be reached" in one["text"] for one in in_cluster)
    return [*findings, *in_cluster, *together]


@pytest.mark.parametrize("name", _ROWS)
def test_problem_is_named_with_its_fix(name, sound, tmp_path_factory) -> None:
    row = _ROWS[name]
    if row.needs_mount and not environments.can_mount():
        pytest.skip("needs root, to mount in a namespace")
    home = tmp_path_factory.mktemp("home")
    with row.make(tmp_path_factory.mktemp(name.replace(" ", "-"))) as setup:
        code, findings = _run(setup, home)
    found = _matching(findings, row)
    assert len(found) == 1, findings
    assert found[0]["level"] == row.level
    assert all(words in found[0]["fix"] for words in row.fix), found
    is_fatal = any(one["level"] == "error" for one in findings)
    assert code == int(is_fatal)
    assert is_fatal or row.level == "warning"
    assert _matching(sound, row) == []


def test_sound_machine_can_train(sound: list[dict[str, Any]]) -> None:
    assert [one for one in sound if one["level"] == "error"] == []
