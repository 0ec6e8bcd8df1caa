"""Runs the sides as processes within a budget, and writes the results after each."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from benchmarks.gpu.options import SideOptions
from benchmarks.gpu.sides import GpuSide

__all__ = ["Plan", "run_sides"]

_REPOSITORY = Path(__file__).parents[2]
_POLL_S = 0.05
_TAIL_BYTES = 2000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """How sides are run.

    Args:
        folder: results, logs and caches.
        budget_s: of all sides together.
        at_once: sides that run at the same time.
        device_gb: memory of the device that these may take together.
        num_rounds: of each side; 0 for the first step only.
        round_s: duration of a round.
        platform: "gpu" or "cpu".
        is_tiny: small sizes.
        side_limit_s: longest duration of a side.
        state_bytes: of the checkpoint.
        cache: folder of compiled programs.
        resumes: True if sides that an earlier run has measured are not measured again.
        profiles: True if sides that can take a profile after their rounds.
        is_gated: True if of the sides at the same time only one trains, while others prepare.
    """

    folder: Path
    budget_s: float
    at_once: int = 1
    device_gb: float = 72.0
    num_rounds: int = 3
    round_s: float = 2.0
    platform: str = "gpu"
    is_tiny: bool = False
    side_limit_s: float = 150.0
    state_bytes: int = 10_000_000_000
    cache: Path
    is_gated: bool = False
    profiles: bool = False
    resumes: bool = False


@dataclasses.dataclass
class _Running:
    side: GpuSide
    process: subprocess.Popen[bytes]
    begun_s: float
    limit_s: float
    files: list[IO[bytes]]


def run_sides(
    sides: Sequence[GpuSide], plan: Plan, say: Callable[[str], None] = print
) -> dict[str, Any]:
    """Runs sides in their order; returns and writes `results.json`.

    A side that no longer fits into the budget is skipped. A side that fails, or takes longer than
    its limit, keeps the figures that it wrote, and the others go on.
    """
    plan.folder.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {
        "machine": {"num_cores": os.cpu_count(), "begun": time.strftime("%Y-%m-%d %H:%M:%S")},
        "plan": {**dataclasses.asdict(plan), "folder": str(plan.folder), "cache": str(plan.cache)},
        "sides": [],
    }
    begun_s = time.monotonic()
    if plan.resumes:
        results["sides"] = _done_before(plan.folder / "results.json")
    done = {(row["key"], row["is_cold"]) for row in results["sides"]}
    waiting = [side for side in sides if (side.key, side.is_cold) not in done]
    running: list[_Running] = []
    try:
        while waiting or running:
            remaining_s = plan.budget_s - (time.monotonic() - begun_s)
            _start_what_fits(waiting, running, plan, remaining_s, results, say)
            for one in list(running):
                if _has_ended(one):
                    running.remove(one)
                    results["sides"].append(_result_of(one, plan))
                    _write(results, plan)
                    say(_line(results["sides"][-1]))
            time.sleep(_POLL_S if running else 0)
    finally:
        for one in running:
            _kill(one)
        _write(results, plan)
    return results


def _done_before(path: Path) -> list[dict[str, Any]]:
    """Returns the results of sides that an earlier run measured to their end."""
    if not path.is_file():
        return []
    rows = json.loads(path.read_text(encoding="utf-8"))["sides"]
    return [row for row in rows if row["status"] == "done"]


def _start_what_fits(
    waiting: list[GpuSide],
    running: list[_Running],
    plan: Plan,
    remaining_s: float,
    results: dict[str, Any],
    say: Callable[[str], None],
) -> None:
    for side in list(waiting):
        if remaining_s < min(side.estimate_s, plan.side_limit_s) * (0.1 if plan.is_tiny else 1):
            waiting.remove(side)
            status = f"skipped: {remaining_s:.0f} s left, needs about {side.estimate_s:.0f} s"
            results["sides"].append(_row(side, status, 0.0, {}))
            _write(results, plan)
            say(f"{side.key}: {status}")
            continue
        together = [*(one.side for one in running), side]
        if len(running) < plan.at_once and (
            not running or _taken_gb(together, plan) <= plan.device_gb
        ):
            waiting.remove(side)
            running.append(_start(side, plan, min(plan.side_limit_s, remaining_s)))
        elif plan.at_once == 1:
            return


def _taken_gb(sides: Sequence[GpuSide], plan: Plan) -> float:
    """Returns the device's memory that sides take together; with a gate, only one trains."""
    whole = [side.device_gb for side in sides]
    if not plan.is_gated:
        return sum(whole)
    prepared = [side.prepared_gb or side.device_gb for side in sides]
    pairs = zip(whole, prepared, strict=True)
    return sum(prepared) + max(train_gb - prepare_gb for train_gb, prepare_gb in pairs)


def _name(side: GpuSide) -> str:
    return f"{side.key}{'-cold' if side.is_cold else ''}"


def _start(side: GpuSide, plan: Plan, limit_s: float) -> _Running:
    logs = plan.folder / "logs"
    logs.mkdir(exist_ok=True)
    saves = plan.folder / "saves" / _name(side)
    result = logs / f"{_name(side)}.json"
    result.unlink(missing_ok=True)
    options = SideOptions(
        **{
            "result": str(result.resolve()),
            "begun_s": time.time(),
            "platform": plan.platform,
            "num_rounds": 0 if side.is_cold else plan.num_rounds,
            "round_s": plan.round_s,
            "is_tiny": plan.is_tiny,
            "folder": str(saves.resolve()),
            "state_bytes": plan.state_bytes,
            "gate": str((plan.folder / "gate").resolve()) if plan.is_gated else "",
            "profile": str((logs / f"{_name(side)}.profile.json").resolve())
            if plan.profiles
            else "",
            **side.options,
        }
    )
    module = side.program if "." in side.program else f"benchmarks.gpu.workers.{side.program}"
    files = [(logs / f"{_name(side)}.{kind}").open("wb") for kind in ("out", "err")]
    process = subprocess.Popen(
        [sys.executable, "-m", module, json.dumps(dataclasses.asdict(options))],
        stdin=subprocess.DEVNULL,
        stdout=files[0],
        stderr=files[1],
        cwd=_REPOSITORY,
        env=_variables(side, plan),
        start_new_session=True,
    )
    return _Running(side, process, time.monotonic(), limit_s, files)


def _variables(side: GpuSide, plan: Plan) -> dict[str, str]:
    cache = plan.cache.resolve()
    if side.is_cold:
        cache = (plan.folder / "cold" / side.key).resolve()
        shutil.rmtree(cache, ignore_errors=True)
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(
            filter(None, [str(_REPOSITORY / "src"), str(_REPOSITORY), os.environ.get("PYTHONPATH")])
        ),
        "PYTHONFAULTHANDLER": "1",
        "JAX_COMPILATION_CACHE_DIR": str(cache / "jax"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_TRACEBACK_FILTERING": "off",
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "JAX_PLATFORMS": "cpu" if plan.platform == "cpu" else "cuda,cpu",
        **side.variables,
    }
    if plan.platform == "cpu":
        variables |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    if plan.at_once > 1:
        variables["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    variables["XLA_PYTHON_CLIENT_MEM_FRACTION"] = "0.9"
    return variables


def _has_ended(one: _Running) -> bool:
    if one.process.poll() is not None:
        return True
    if time.monotonic() - one.begun_s < one.limit_s:
        return False
    _kill(one)
    return True


def _kill(one: _Running) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(one.process.pid, signal.SIGKILL)
    one.process.wait()


def _result_of(one: _Running, plan: Plan) -> dict[str, Any]:
    seconds = time.monotonic() - one.begun_s
    _kill(one)  # children that the process left behind
    for file in one.files:
        file.close()
    shutil.rmtree(plan.folder / "saves" / _name(one.side), ignore_errors=True)
    path = plan.folder / "logs" / f"{_name(one.side)}.json"
    figures = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if seconds >= one.limit_s:
        status = f"ended after its limit of {one.limit_s:.0f} s, stage: {figures.get('stage')}"
    elif one.process.returncode == 0 and figures.get("stage") == "done":
        status = "done"
    else:
        status = f"failed with exit code {one.process.returncode}"
    row = _row(one.side, status, seconds, figures)
    if status != "done":
        row["error"] = _tail(path.with_suffix(".err"))
    return row


def _row(side: GpuSide, status: str, seconds: float, figures: dict[str, Any]) -> dict[str, Any]:
    return {
        "workload": side.workload,
        "name": side.name,
        "key": side.key,
        "is_ours": side.is_ours,
        "is_cold": side.is_cold,
        "status": status,
        "seconds": round(seconds, 1),
        **figures,
    }


def _tail(path: Path) -> str:
    data = path.read_bytes()[-_TAIL_BYTES:] if path.is_file() else b""
    return data.decode(errors="replace")


def _line(row: dict[str, Any]) -> str:
    speeds = [round(one, 2) for one in row.get("steps_per_s", [])]
    parts = [f"{row['key']}{' (cold)' if row['is_cold'] else ''}: {row['status']}"]
    parts.append(f"{row['seconds']} s")
    for name in ("first_step_s", "first_call_s", "compile_s", "first_loss", "last_loss"):
        if row.get(name) is not None:
            parts.append(f"{name} {row[name]:.3f}")
    if speeds:
        parts.append(f"steps/s {speeds}")
    if row.get("peak_bytes"):
        parts.append(f"peak {row['peak_bytes'] / 1e9:.2f} GB")
    if row.get("saves"):
        parts.append(json.dumps(row["saves"]))
    if row.get("error"):
        parts.append("\n" + row["error"])
    return "; ".join(parts)


def _write(results: dict[str, Any], plan: Plan) -> None:
    temporary = plan.folder / "results.json.new"
    temporary.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    temporary.replace(plan.folder / "results.json")
