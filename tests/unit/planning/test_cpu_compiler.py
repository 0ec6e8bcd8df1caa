"""Compilation of exported programs in a process with as many CPU devices as the plan has."""

from __future__ import annotations

import dataclasses
import json
import pickle
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from stratagem.planning import cpu_compiler

SCRIPT = str(Path(cpu_compiler.__file__))


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, SCRIPT, *arguments], capture_output=True, text=True, check=False
    )


def test_sum_over_twelve_devices_is_compiled_with_its_memory(tmp_path) -> None:
    pytest.importorskip(
        "flatbuffers", reason="exports need it: pip install 'stratagem[checkpoint]'"
    )
    mesh = AbstractMesh((12,), ("replica",))
    sharded = NamedSharding(mesh, PartitionSpec("replica"))
    shape = jax.ShapeDtypeStruct((24, 5), np.float32, sharding=sharded)
    function = jax.jit(lambda x: x.sum(axis=0), out_shardings=NamedSharding(mesh, PartitionSpec()))
    # Without its gradient, which cannot be pickled.
    exported = dataclasses.replace(
        jax.export.export(function, platforms=["cpu"])(shape), _get_vjp=None
    )
    source, result = tmp_path / "source", tmp_path / "result"
    source.write_bytes(pickle.dumps(([("replica", 12)], [(exported, 0)])))
    done = run(str(source), str(result))
    assert done.returncode == 0, done.stderr
    (report,) = json.loads(result.read_text())
    assert report["memory"]["argument_bytes"] == 2 * 5 * 4, "two rows for each device"
    assert report["memory"]["output_bytes"] == 5 * 4
    assert re.search(r"all-reduce.*replica_groups", report["text"])
    assert report["accessed_bytes"] > 0


@pytest.mark.slow
def test_source_that_is_not_there_ends_the_process_with_an_error(tmp_path) -> None:
    done = run(str(tmp_path / "none"), str(tmp_path / "result"))
    assert done.returncode != 0
    assert "FileNotFoundError" in done.stderr
    assert not (tmp_path / "result").exists()
