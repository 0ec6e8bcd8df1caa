"""Draws `run_report_four_hosts.png`: four hosts, of which one is killed and one is unplugged.

python -m docs.pictures.draw_four_hosts [FOLDER]

The hosts are network namespaces with real `sshd`. One `stratagem launch` trains digits on all of
them. Host c is killed and started again; then the cable of host b is pulled and plugged in again.
The lines of the launcher go to the page, too. Takes three minutes. Needs root, iproute2, OpenSSH
and Chromium. A run already in FOLDER is not repeated.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from docs.generate_tool_pages import insert, redact
from docs.pictures.draw_run_report import draw_report
from stratagem.observe.run_events.reader import read_run
from stratagem.observe.run_events.records import StepEvent
from tests.unit.launch.nodes.ssh_hosts import reason_to_skip, ssh_hosts
from tests.unit.launch.waiting import until

HERE = Path(__file__).parent
PAGE = HERE.parent / "clusters" / "many_machines.md"
RUN = "runs/digits"
OPTIONS = (
    "--hosts a,b,c,d --nnodes 2:4 --max-restarts 10 --node-timeout-s 5 --rejoin-after-s 0 "
    f"--grace-s 3 --show leader --run-dir {RUN} train.py"
)
# Of each start of the tasks, before the next fault.
NUM_STEPS = 40
LIMIT_S = 240
TRAIN = """
import time

import stratagem as sg
import keras
from sklearn.datasets import load_digits

keras.utils.set_random_seed(0)
images, labels = load_digits(return_X_y=True)
strategy = sg.MultiWorkerMirroredStrategy()


class Digits(keras.utils.PyDataset):
    def __len__(self):
        return 17

    def __getitem__(self, index):
        time.sleep(0.1)
        rows = slice(100 * index, 100 * (index + 1))
        return images[rows] / 16, labels[rows]


with strategy.scope():
    model = keras.Sequential([keras.layers.Dense(64, "relu"), keras.layers.Dense(10, "softmax")])
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
leaving = sg.TerminationConfig()
backup = sg.BackupAndRestore("backup", save_freq=40, termination_config=leaving)
model.fit(Digits(), epochs=24, verbose=0, callbacks=[backup])
"""


def main() -> None:
    """Trains, unless a folder with the run is given, and draws."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(sys.argv[1] if len(sys.argv) > 1 else temporary).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        printed = folder / "printed.txt"
        if not printed.exists():
            printed.write_text(train(folder))
        text = redact(printed.read_text(), str(folder))
        PAGE.write_text(insert(PAGE.read_text(), "four_hosts", text))
        os.chdir(folder)
        draw_report(RUN, "run_report_four_hosts", 3270)


def train(folder: Path) -> str:
    """Trains on four hosts with both faults; returns what the launcher prints."""
    reason = reason_to_skip()
    assert reason is None, reason
    (folder / "train.py").write_text(TRAIN)
    with ssh_hosts(folder, "10.92.0") as made:
        terminal = made.launch(*OPTIONS.split(), folder=folder)
        wait_for_steps(folder, 0)
        made.kill("c")
        wait_for_steps(folder, 1)
        made.boot("c")
        wait_for_steps(folder, 2)
        made.plug("b", "down")
        wait_for_steps(folder, 3)
        made.plug("b", "up")
        printed, _ = terminal.communicate(timeout=LIMIT_S)
    assert terminal.returncode == 0, printed
    return printed


def wait_for_steps(folder: Path, attempt: int) -> None:
    """Waits until the tasks have done steps after a start."""

    def num_steps() -> int:
        return max(
            (
                sum(event.num_steps for event in one.events if isinstance(event, StepEvent))
                for one in read_run(folder / RUN).processes
                if one.start.attempt == attempt
            ),
            default=0,
        )

    until((folder / RUN / "events").exists)
    until(lambda: num_steps() >= NUM_STEPS)


if __name__ == "__main__":
    main()
