"""Views of a real run: two workers, a kill, a restart, and a worker that reads slowly."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from stratagem.cli import main
from stratagem.observe.goodput.account import account_for
from stratagem.observe.monitoring.html_report import load_run
from stratagem.observe.monitoring.run_series import NUM_COLUMNS
from stratagem.observe.run_events.reader import read_run
from tests.command_runner import CliRunner

_PROGRAM = """
import os, time, warnings
import stratagem as sg
import keras
import numpy as np

is_first = os.environ.get("STRATAGEM_RESTART_COUNT", "0") == "0"
strategy = sg.MultiWorkerMirroredStrategy()
rank = strategy.cluster_resolver.task_id
warnings.warn("the data is old", UserWarning)


class Rows(keras.utils.PyDataset):
    def __len__(self):
        return 20

    def __getitem__(self, index):
        time.sleep(0.1 if rank == 1 else 0.0)
        rows = np.full((4, 3), index, "float32")
        return rows, rows[:, :1]


class Kill(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if is_first and rank == 1 and epoch == 1:
            os._exit(7)


with strategy.scope():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
backup = sg.BackupAndRestore(os.environ["BACKUP"])
model.fit(Rows(), epochs=3, verbose=0, callbacks=[Kill(), backup])
"""


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    (folder / "train.py").write_text(_PROGRAM)
    command = "launch --workers 2 --max-restarts 1 --run-dir run train.py"
    subprocess.run(
        [sys.executable, "-m", "stratagem", *command.split()],
        cwd=folder,
        env=os.environ | {"BACKUP": str(folder / "backup")},
        check=True,
        timeout=300,
    )
    return folder / "run"


@pytest.mark.slow
def test_watch_shows_the_run_as_it_ended(run_dir) -> None:
    result = CliRunner().invoke(main, ["watch", str(run_dir), "--json"])
    shown = json.loads(result.stdout)
    assert (shown["is_over"], shown["num_launches"], shown["num_restarts"]) == (True, 1, 1)
    assert (shown["step"], shown["total_steps"], shown["epoch"]) == (60, 60, 3)
    assert set(shown["values"]) == {"loss"}
    tasks = {task["task"]: task for task in shown["tasks"]}
    assert tasks["worker 1"]["is_straggler"]
    assert tasks["worker 1"]["delay_s"] > tasks["worker 0"]["delay_s"] == 0
    assert tasks["worker 0"]["host_bytes"] > 50 * 1024**2
    assert {one["text"] for one in shown["warnings"]} >= {"the data is old"}


@pytest.mark.slow
def test_start_up_is_apart_from_goodput(run_dir) -> None:
    account = account_for(read_run(run_dir))
    assert account.goodput_after_startup is not None
    assert account.goodput_after_startup > account.goodput
    assert account.startup_s > 0
    assert account.problems == ()


@pytest.mark.slow
def test_report_shows_who_held_up_whom(run_dir) -> None:
    series = load_run(run_dir).series
    assert series.stragglers is not None
    fast, slow = ([delay for delay in row if delay == delay] for row in series.stragglers.delays_s)
    assert sum(delay > 0.02 for delay in slow) > len(slow) / 2
    assert sum(delay > 0.02 for delay in fast) < len(fast) / 4
    assert len(series.speed.values) == NUM_COLUMNS
    assert len(series.saves) >= 3
    assert CliRunner().invoke(main, ["report", str(run_dir)]).exit_code == 0
    assert "worker 1 failed (exit code 7)" in (run_dir / "report.html").read_text()
