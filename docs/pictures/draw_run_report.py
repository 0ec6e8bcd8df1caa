"""Draws `run_watch.svg` and `run_report.png`, the picture of the page, from a real run.

python docs/pictures/draw_run_report.py [FOLDER]

Two workers train on digits. Worker 1 dies once, and reads its data slowly for a while. Takes a
minute. A run already in FOLDER is not repeated.
"""

from __future__ import annotations

import io
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from stratagem.observe.events import ProcessEvents, RunEvents, StepEvent, read_run
from stratagem.observe.goodput import account_for
from stratagem.observe.report_page import draw
from stratagem.observe.run_state import RunState
from stratagem.observe.terminal import frame

HERE = Path(__file__).parent
NAME = "runs/digits"
# Worker 1 waits longer than this for each batch while it is slow.
SLOW_S = 0.2
TRAIN = """
import os
import time

import stratagem as sg
import keras
from sklearn.datasets import load_digits

is_first_start = os.environ.get("STRATAGEM_RESTART_COUNT", "0") == "0"
keras.utils.set_random_seed(0)
images, labels = load_digits(return_X_y=True)
strategy = sg.MultiWorkerMirroredStrategy()
rank = strategy.cluster_resolver.task_id


class Digits(keras.utils.PyDataset):
    def __len__(self):
        return 17

    def __getitem__(self, index):
        is_slow = not is_first_start and rank == 1 and 13 <= watch.epoch < 18
        time.sleep(0.25 if is_slow else 0.05)
        rows = slice(100 * index, 100 * (index + 1))
        return images[rows] / 16, labels[rows]


class Watch(keras.callbacks.Callback):
    epoch = 0

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch
        if is_first_start and rank == 1 and epoch == 9:
            os._exit(7)


watch = Watch()
with strategy.scope():
    model = keras.Sequential([keras.layers.Dense(64, "relu"), keras.layers.Dense(10, "softmax")])
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
backup = sg.BackupAndRestore("backup", save_freq=40)
model.fit(Digits(), epochs=24, verbose=0, callbacks=[watch, backup])
"""


def main() -> None:
    """Trains, unless a folder with the runs is given, and draws."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(sys.argv[1] if len(sys.argv) > 1 else temporary)
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / NAME).exists():
            train(folder)
        os.chdir(folder)
        draw_frame()
        draw(read_run(NAME), HERE / "run_report.png")


def train(folder: Path) -> None:
    """Runs the program with two workers."""
    (folder / "train.py").write_text(TRAIN)
    launcher = Path(sys.executable).with_name("stratagem")
    subprocess.run(
        [launcher, *f"launch --workers 2 --max-restarts 1 --run-dir {NAME} train.py".split()],
        cwd=folder,
        check=True,
    )


def draw_frame() -> None:
    """Draws the terminal in the middle of the time in which worker 1 is slow."""
    whole = read_run(NAME)
    until_s = statistics.median(
        process.at_s(event)
        for process in whole.processes
        for event in process.events
        if isinstance(event, StepEvent) and (event.input_s or 0.0) > SLOW_S * event.num_steps
    )
    processes = tuple(
        ProcessEvents(
            start=one.start,
            events=tuple(event for event in one.events if one.at_s(event) <= until_s),
        )
        for one in whole.processes
        if one.start.time_s <= until_s
    )
    state = RunState()
    state.add(processes, until_s)
    console = Console(record=True, width=108, file=io.StringIO(), force_terminal=True)
    account = account_for(RunEvents(processes=processes))
    console.print("$ stratagem watch runs/digits", style="bold")
    console.print(frame(NAME, state.snapshot(until_s), account))
    console.save_svg(str(HERE / "run_watch.svg"), title="stratagem watch")


if __name__ == "__main__":
    main()
