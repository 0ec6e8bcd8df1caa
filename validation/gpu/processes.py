"""Strategies of several processes that share the one GPU, or are refused in clear words."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from typing import Any

import numpy as np

from validation.gpu.checks import ROOT, check, is_on_cpu

PROGRAMS = ROOT / "tests" / "gpu" / "programs"


def launched(*arguments: str, timeout_s: float = 80, **environment: str) -> dict[str, Any]:
    """Runs `stratagem launch`; returns the results that tasks printed, the output and the code."""
    begin_s = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "stratagem", "launch", *arguments],
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.terminate()
        try:
            output, _ = process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
        raise AssertionError(f"not done after {timeout_s} s:\n{output[-6000:]}") from None
    results = [
        json.loads(line.split("RESULT ", 1)[1])
        for line in output.splitlines()
        if "RESULT {" in line
    ]
    return {
        "code": process.returncode,
        "time_s": time.monotonic() - begin_s,
        "results": results,
        "output": output[-8000:],
    }


def _refused(*arguments: str, words: str, **environment: str) -> dict[str, Any]:
    ended = launched("--workers", "2", *arguments, **environment)
    assert len(ended["results"]) == 2, ended
    if is_on_cpu():  # two CPU devices
        assert all(np.isfinite(one["losses"]).all() for one in ended["results"]), ended
        return ended
    for one in ended["results"]:
        assert words in one.get("message", ""), ended
        assert one["time_s"] < 60, ended
    return ended


@check(priority=0)
def two_lockstep_processes_with_one_gpu() -> dict[str, Any]:
    """NCCL refuses; our error comes first, on both, and names them."""
    return _refused(str(PROGRAMS / "lockstep.py"), "lockstep", words="use the same GPU")


@check(priority=1)
def two_local_update_processes_with_one_gpu() -> dict[str, Any]:
    return _refused(str(PROGRAMS / "lockstep.py"), "local", words="use the same GPU")


@check(priority=1)
def elastic_processes_with_one_gpu() -> dict[str, Any]:
    """Elastic processes compute on CPU: refused on the GPU, and it works beside it."""
    figures = {}
    if not is_on_cpu():
        figures["on gpu"] = _refused(
            str(PROGRAMS / "lockstep.py"), "elastic", words="JAX_PLATFORMS=cpu"
        )
    ended = launched(
        "--workers",
        "2",
        str(PROGRAMS / "lockstep.py"),
        "elastic",
        JAX_PLATFORMS="cpu",
        JAX_NUM_CPU_DEVICES="1",
    )
    figures["on cpu"] = ended
    losses = [one.get("losses") for one in ended["results"]]
    assert len(losses) == 2, ended
    assert losses[0] is not None, ended
    assert np.isfinite(losses[0]).all(), ended
    assert losses[0] == losses[1], ended
    return figures


@check(priority=0)
def parameter_server_programs_on_the_gpu() -> dict[str, Any]:
    """A chief and a worker compute on the GPU; the servers are processes of the host."""
    if importlib.util.find_spec("ray") is None:
        return {"skipped": "Ray, which a cluster of parameter servers needs, is not installed"}
    ended = launched("--chief", "--workers", "1", "--ps", "1", str(PROGRAMS / "independent.py"))
    assert ended["code"] == 0, ended
    assert len(ended["results"]) == 2, ended
    for one in ended["results"]:
        assert one["finite"], ended
        if not is_on_cpu():
            assert "cuda" in one["devices"][0].lower(), ended
    first = min(one["losses"][0] for one in ended["results"])
    assert min(one["losses"][-1] for one in ended["results"]) < first, ended
    return ended


@check(priority=1)
def parameter_server_of_this_machine() -> dict[str, Any]:
    """Two workers and a server that the strategy starts: the coordinator alone has the GPU."""
    return _parameter_servers()


@check(priority=0)
def parameter_server_workers_on_the_gpu() -> dict[str, Any]:
    """The same with workers that see the GPU, as those of a cluster of machines do."""
    from stratagem.parameter_server import clusters as coordinated_cluster

    if not is_on_cpu():
        coordinated_cluster._OF_LOCAL["JAX_PLATFORMS"] = "cuda,cpu"
    figures = _parameter_servers()
    for used in figures["devices of workers"]:
        assert is_on_cpu() or "cuda" in used[0].lower(), figures
    return figures


def _parameter_servers() -> dict[str, Any]:
    import stratagem as sg
    from validation.gpu.models import train

    with sg.ParameterServerStrategy(num_workers=2, num_servers=1) as strategy:
        model = train(strategy, "mlp", epochs=4)
        losses = model.losses_of_fit
        coordinator = sg.coordinator.ClusterCoordinator(strategy)
        used = coordinator.fetch([coordinator.schedule(_devices) for _ in range(4)])
    assert np.isfinite(losses).all(), losses
    assert losses[-1] < losses[0] + 0.1, losses
    return {"losses": losses, "devices of workers": used}


def _devices() -> list[str]:
    import jax

    return [str(one) for one in jax.devices()]
