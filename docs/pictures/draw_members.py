"""Draws `members.png`: three workers, one of which is killed twice and joins again, as events say.

python docs/pictures/draw_members.py [FOLDER]

Takes two minutes. A run already in FOLDER is not repeated.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from stratagem.observe.events import read_run
from stratagem.observe.goodput import Account, MemberChange, account_for
from stratagem.observe.report_page import Line, speed_of
from stratagem.observe.terminal import duration_text

HERE = Path(__file__).parent
BLUE, RED, GREEN, GRAY = "#2a78b8", "#c8372d", "#3a9a5b", "#e6e6e6"
TRAIN = """
import os
import signal
import time

import stratagem as sg

strategy = sg.ElasticStrategy()

import keras
from sklearn.datasets import load_digits

keras.utils.set_random_seed(0)
images, labels = load_digits(return_X_y=True)
num_starts = int(os.environ["STRATAGEM_RESTART_COUNT"])
rank = strategy.cluster_resolver.task_id


class Kill(keras.callbacks.Callback):
    num_batches = 0

    def on_train_batch_begin(self, batch, logs=None):
        time.sleep(0.05)

    def on_train_batch_end(self, batch, logs=None):
        self.num_batches += 1
        if rank == 1 and num_starts < 2 and self.num_batches == 200:
            os.kill(os.getpid(), signal.SIGKILL)


with strategy.scope():
    model = keras.Sequential(
        [keras.Input((64,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(10, "softmax")]
    )
    model.compile("adam", "sparse_categorical_crossentropy")
images, labels = images[:1700] / 16, labels[:1700]  # whole batches
model.fit(images, labels, batch_size=100, epochs=70, verbose=0, callbacks=[Kill()])
"""


def main() -> None:
    """Trains, unless a folder with the run is given, and draws."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(sys.argv[1] if len(sys.argv) > 1 else temporary)
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "run").exists():
            train(folder)
        draw(folder / "run")


def train(folder: Path) -> None:
    """Runs the program with three workers."""
    (folder / "train.py").write_text(TRAIN)
    launcher = Path(sys.executable).with_name("stratagem")
    command = "launch --workers 3 --survivors --max-restarts 2 --run-dir run train.py"
    subprocess.run([launcher, *command.split()], cwd=folder, check=True)


def draw(run_dir: Path) -> None:
    """Draws members and speed over time."""
    run = read_run(run_dir)
    account = account_for(run)
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    members, speed = figure.subplots(2, 1, sharex=True, height_ratios=(1, 1.3))
    draw_members(members, account)
    draw_speed(speed, speed_of(run, account))
    for axes in (members, speed):
        axes.set_xlim(0, account.whole_s)
        axes.grid(axis="y", color=GRAY, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(HERE / "members.png", dpi=130)


def draw_members(axes: Any, account: Account) -> None:
    """Draws the number of members, and names each change with its pause."""
    changes = account.member_changes
    times_s = [change.at_s for change in changes]
    numbers = [change.num_members for change in changes]
    axes.plot(
        [*times_s, account.whole_s],
        [*numbers, numbers[-1]],
        color=BLUE,
        linewidth=2,
        drawstyle="steps-post",
    )
    for change in changes:
        if change.cause is not None:
            mark(axes, change)
    axes.set_ylim(0, 4.4)
    axes.set_yticks(range(4))
    axes.set_ylabel("members")


def mark(axes: Any, change: MemberChange) -> None:
    """Marks a loss or a join."""
    is_loss = bool(change.lost)
    color, marker = (RED, "v") if is_loss else (GREEN, "^")
    pause = "unknown" if change.pause_s is None else duration_text(change.pause_s)
    text = f"{'lost' if is_loss else 'joined'}\npause {pause}"
    # Losses below the line, joins above it: one may follow soon after the other.
    height, align = (1.75, "top") if is_loss else (3.3, "bottom")
    axes.plot([change.at_s], [height], marker, color=color, markersize=7)
    axes.annotate(
        text,
        (change.at_s, height),
        (8, 5 if is_loss else -5),
        textcoords="offset points",
        color=color,
        ha="left",
        va=align,
        fontsize=9,
    )


def draw_speed(axes: Any, speed: Line) -> None:
    """Draws steps per second."""
    axes.plot(speed.times_s, speed.values, color=BLUE, linewidth=2, drawstyle="steps-post")
    axes.set_ylim(0, 1.15 * max(speed.values))
    axes.set_ylabel("steps per second")
    axes.set_xlabel("seconds from the first start")


if __name__ == "__main__":
    main()
