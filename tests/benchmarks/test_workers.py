"""The real workers, with few steps: ours and the hand-written ones compute the same."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.cases import Environments, Place, Side, jax_side
from benchmarks.worker_process import WorkerProcess
from tests.command_runner import CliRunner

pytestmark = pytest.mark.slow

ENVIRONMENTS = Environments()
LIMIT_S = 120.0


def losses(module: str, steps_per_call: int) -> list[float]:
    """The losses of two short epochs of the MLP on two devices."""
    return _losses_of(jax_side(module, module, "mlp", Place("cpu", 2), steps_per_call))


def _losses_of(side: Side) -> list[float]:
    side = _shortened(side)
    command, variables = ENVIRONMENTS.command(side), ENVIRONMENTS.variables(side)
    with WorkerProcess(side.name, command, variables) as worker:
        worker.read_answer(LIMIT_S)
        return [worker.ask({"epochs": 1}, LIMIT_S)["loss"] for _ in range(2)]


def _shortened(side: Side) -> Side:
    return dataclasses.replace(side, options=dataclasses.replace(side.options, steps_per_epoch=4))


@pytest.mark.parametrize(
    ("ours", "by_hand", "steps_per_call"),
    [
        ("stratagem_fit", "jax_scan_loop", 2),
        ("stratagem_run", "jax_step_loop", 1),
    ],
)
def test_both_sides_compute_the_same(ours: str, by_hand: str, steps_per_call: int) -> None:
    got, wanted = losses(ours, steps_per_call), losses(by_hand, steps_per_call)
    assert got == pytest.approx(wanted, rel=1e-4)
    assert got[1] < got[0]


def test_loops_over_encoded_images_read_the_same() -> None:
    place = Place("cpu", 1)
    got, wanted = (
        _losses_of(jax_side(module, module, "encoded_images", place, step_s=0.001))
        for module in ("stratagem_input", "grain_loop")
    )
    assert got == pytest.approx(wanted, rel=1e-5)


def test_run_overhead_runs(tmp_path: Path) -> None:
    arguments = ["run_overhead", "--quick", "--devices", "2", "--only", "MLP"]
    result = CliRunner().invoke(main, [*arguments, "--output", str(tmp_path)])
    assert result.exit_code == 0, result.output
    written = json.loads((tmp_path / "run_overhead.json").read_text(encoding="utf-8"))
    (row,) = written["rows"]
    assert row["case"] == "MLP, 2 CPU"
    assert row["ratio"] > 0
    assert "jax" in written["versions"]["ours"]
    assert (tmp_path / "run_overhead.png").exists()
