"""The commands on a machine with a GPU: they name it, its memory and its driver."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from typing import Any

import numpy as np

from validation.gpu.checks import ROOT, check, device, is_on_cpu


def _command(*arguments: str, timeout_s: float = 80) -> tuple[int, str, str]:
    ended = subprocess.run(
        [sys.executable, "-m", "stratagem", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        stdin=subprocess.DEVNULL,
        cwd=ROOT,
    )
    return ended.returncode, ended.stdout, ended.stderr


@check(priority=1)
def doctor_and_devices() -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for name in ("doctor", "devices", "env"):
        code, output, errors = _command(name)
        figures[name] = {"code": code, "output": output, "errors": errors[-2000:]}
    code, output, errors = _command("devices", "--json")
    assert code == 0, errors
    figures["devices --json"] = json.loads(output)
    code, output, errors = _command("doctor", "--json")
    figures["doctor --json"] = {"code": code, "output": output}
    assert figures["devices"]["code"] == 0, figures
    if not is_on_cpu():
        first = figures["devices --json"]["devices"][0]
        assert first["name"] == "gpu:0", figures
        assert first["memory_bytes"] > 2**30, figures
        assert "H100" in figures["doctor"]["output"] or "NVIDIA" in figures["doctor"]["output"]
        assert "driver" in figures["doctor"]["output"].lower(), figures
    return figures


@check(priority=2)
def profile_of_steps() -> dict[str, Any]:
    import keras

    import stratagem as sg

    keras.utils.set_random_seed(0)
    size = 64 if is_on_cpu() else 2048
    with sg.MirroredStrategy([device()]).scope():
        model = keras.Sequential(
            [keras.Input((size,)), *[keras.layers.Dense(size, "relu") for _ in range(4)]]
        )
        model.compile("adam", "mse")
    x = np.random.default_rng(0).random((size * 8, size)).astype("float32")
    with tempfile.TemporaryDirectory() as folder:
        profile = sg.profile(steps=(10, 20), folder=folder, verbose=False)
        model.fit(x, x, batch_size=size // 4, epochs=1, verbose=0, callbacks=[profile])
        summary = profile.summary
        assert summary is not None
        code, output, errors = _command("profile", folder, "--top", "5")
    assert code == 0, errors
    figures = {
        "num_steps": summary.num_steps,
        "num_devices": summary.num_devices,
        "whole_s": summary.whole_s,
        "parts_s": dict(summary.parts_s),
        "report": output,
    }
    assert summary.num_steps == 10, figures
    assert summary.parts_s["compute"] > 0, figures
    return figures


@check(priority=3, timeout_s=180)
def selftest() -> dict[str, Any]:
    """`stratagem doctor --self-test`: a short training under every strategy."""
    code, output, errors = _command("doctor", "--self-test", timeout_s=170)
    assert code == 0, (output[-6000:], errors[-2000:])
    return {"output": output[-8000:]}


@check(priority=2)
def memory_in_run_events() -> dict[str, Any]:
    """A run folder records the GPU's memory in use."""
    import stratagem as sg
    from stratagem.devices.finding import device_memory
    from validation.gpu.models import train

    train(sg.MirroredStrategy([device()]), "mlp")
    used, limit = device_memory()
    assert is_on_cpu() or (used and limit and used < limit), (used, limit)
    return {"used_bytes": used, "limit_bytes": limit}
