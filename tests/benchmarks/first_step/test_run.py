"""Rounds, caches and failures with sides that train nothing, and real processes of the MLP."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
from rich.console import Console

from benchmarks.cases import Environments
from benchmarks.first_step import run as module
from benchmarks.first_step import run_first_step
from benchmarks.runner import Effort
from benchmarks.worker_process import WorkerError
from tests.run_events.test_wait_clock import ticking

NO_PEERS = Environments(peers=Path("nowhere"))
OURS = ["Stratagem, 1 device", "Stratagem, 2 devices"]
KERAS = ["Keras on JAX", "Keras DataParallel, 2 devices"]
WARM = [f"{name}, warm" for name in (*OURS, "Keras on JAX")]


class FakeProcess:
    """Answers as a worker does; the sides and caches of all starts are kept in `started`."""

    started: ClassVar[list[tuple[str, str]]] = []
    failing = ""
    loss = 1.0

    def __init__(self, name: str, command: list[str], variables: dict[str, str]) -> None:
        self.name = name
        cache = variables.get("TORCHINDUCTOR_CACHE_DIR", "")
        if not cache and variables.get("JAX_ENABLE_COMPILATION_CACHE") != "false":
            of_jax = variables.get("JAX_COMPILATION_CACHE_DIR")
            cache = of_jax or variables["STRATAGEM_CACHE_DIR"]
        self.started.append((name, cache))
        self._seconds = iter((2.0, 0.5))

    def __enter__(self) -> FakeProcess:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def read_answer(self, limit_s: float) -> dict[str, Any]:
        if self.name == self.failing:
            raise WorkerError("no such device")
        return {"versions": {"python": "3"}}

    def ask(self, question: dict[str, Any], limit_s: float) -> dict[str, Any]:
        assert question == {"epochs": 1}
        return {"seconds": next(self._seconds), "cpu_s": 3.0, "loss": self.loss}


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> type[FakeProcess]:
    class Process(FakeProcess):
        started: ClassVar[list[tuple[str, str]]] = []

    monkeypatch.setattr(module, "WorkerProcess", Process)
    monkeypatch.setattr(module, "time", ticking())
    return Process


def measure(
    folder: Path, environments: Environments = NO_PEERS, **options: Any
) -> tuple[bool, dict[str, Any], str]:
    console = Console(width=150, record=True, file=io.StringIO())
    effort = Effort(num_rounds=2)
    went_well = run_first_step(environments, effort, console, folder, **options)
    written = json.loads((folder / "first_step.json").read_text(encoding="utf-8"))
    return went_well, written, console.export_text()


def test_every_round_starts_each_side_again(tmp_path: Path, processes: type[FakeProcess]) -> None:
    went_well, written, text = measure(tmp_path, only="BERT")
    assert went_well
    names = [name for name, _ in processes.started]
    # The machine is warmed up and caches are filled; in each round somebody else is first.
    assert names[:7] == [*OURS, *KERAS, *WARM]
    assert names[7:14] == [*OURS, *KERAS, *WARM]
    assert names[14:] == [*OURS[1:], *KERAS, *WARM, OURS[0]]
    assert [row["name"] for row in written["rows"]] == [*OURS, *KERAS, *WARM]
    for row in written["rows"]:
        assert row["first_step_s"] == [2.0, 2.0]
        assert row["first_step_cpu_s"] == [3.0, 3.0]
        assert row["second_step_s"] == [0.5, 0.5]
        assert len(row["from_start_s"]) == 2
    assert "Skipped: Keras on TensorFlow" in text
    assert [one["name"] for one in written["skipped"]] == ["Keras on TensorFlow", "torch.compile"]


@pytest.mark.slow
def test_warm_sides_find_what_their_first_run_left(
    tmp_path: Path, processes: type[FakeProcess]
) -> None:
    interpreter = tmp_path / "python"
    interpreter.touch()
    went_well, written, _ = measure(tmp_path, Environments(peers=interpreter), only="MLP")
    assert went_well
    caches: dict[str, list[str]] = {}
    for name, cache in processes.started:
        caches.setdefault(name, []).append(cache)
    for name in WARM:
        assert len(caches[name]) == 1 + 2 * 3  # a light workload has three times as many rounds
        assert len(set(caches[name])) == 1
    assert len({caches[name][0] for name in WARM}) == len(WARM)
    assert set(caches["Keras on JAX"]) == {""}
    # Two runs, each with an empty folder: unmeasured, and in the first round. The compiler that
    # PyTorch calls splits paths at spaces.
    assert len(set(caches["torch.compile"])) == len(caches["torch.compile"]) == 2
    assert not any(" " in Path(cache).name for cache in caches["torch.compile"])
    (torch,) = (row for row in written["rows"] if row["name"] == "torch.compile")
    assert torch["ratios"]["first_step_s"] == [1.0]


@pytest.mark.slow
def test_machine_is_warmed_up_once(tmp_path: Path, processes: type[FakeProcess]) -> None:
    measure(tmp_path, only="-")  # GPT-2 and ResNet-50
    names = [name for name, _ in processes.started]
    assert len(names) == 4 + 2 * (3 + 2 * 7)
    assert names[21:24] == WARM


def test_what_is_measured_is_kept_though_the_rest_is_interrupted(
    tmp_path: Path, processes: type[FakeProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setitem(module._STARTS, "imports", interrupt)
    with pytest.raises(KeyboardInterrupt):
        measure(tmp_path, is_quick=True)
    written = json.loads((tmp_path / "first_step.json").read_text(encoding="utf-8"))
    assert [row["workload"] for row in written["rows"]] == ["MLP"] * 7


def test_failed_side_has_no_row_and_the_others_go_on(
    tmp_path: Path, processes: type[FakeProcess]
) -> None:
    processes.failing = "Keras on JAX"
    went_well, written, text = measure(tmp_path, only="MLP")
    assert not went_well
    assert [row["name"] for row in written["rows"]] == [*OURS, KERAS[1], *WARM]
    assert all(row["ratios"] == {} for row in written["rows"])
    cases = [one["case"] for one in written["failures"]]
    assert cases == ["warming up, Keras on JAX", "MLP, Keras on JAX"]
    assert "no such device" in text


def test_loss_that_is_no_number_is_a_failure(tmp_path: Path, processes: type[FakeProcess]) -> None:
    processes.loss = float("nan")
    went_well, written, _ = measure(tmp_path, only="MLP")
    assert not went_well
    assert written["rows"] == []
    assert "The loss of 'Keras DataParallel, 2 devices' is nan" in written["failures"][-1]["error"]
    assert not (tmp_path / "first_step.png").exists()


@pytest.mark.slow
@pytest.mark.parametrize("only", ["MLP", "imports", "two workers"])
def test_real_processes_tell(tmp_path: Path, only: str) -> None:
    went_well, written, _ = measure(tmp_path, only=only, is_quick=True)
    assert went_well, written["failures"]
    names = [one["name"] for one in (*written["rows"], *written["starts"])]
    assert (
        names
        == {
            "MLP": [*OURS, *KERAS, *WARM],
            "imports": ["import stratagem", "import keras after stratagem"],
            "two workers": ["MLP, 2 workers by `stratagem launch`"],
        }[only]
    )
    for row in written["rows"]:
        (first_s,), (start_s,), (second_s,) = (
            row[key] for key in ("first_step_s", "from_start_s", "second_step_s")
        )
        assert 0 < second_s < first_s < start_s
        assert row["first_step_cpu_s"][0] > 0
    assert all(seconds > 0 for one in written["starts"] for seconds in one["seconds"])
