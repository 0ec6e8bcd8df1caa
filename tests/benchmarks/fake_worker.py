"""A worker that trains nothing: what it does is told by variables of its environment."""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path

from benchmarks.workers.protocol import ANSWER_PREFIX, Training, WorkerOptions, serve

BEHAVIOUR = os.environ["FAKE_BEHAVIOUR"]


def main() -> None:
    if BEHAVIOUR == "noisy":
        print("a banner on stdout", flush=True)
        serve(prepare_noisily)
        return
    if BEHAVIOUR == "dies at start":
        sys.exit("no such device")
    answer({"versions": {"python": "3"}, "device_kind": "fake"})
    for line in sys.stdin:
        train(json.loads(line)["epochs"])


def train(num_epochs: int) -> None:
    if BEHAVIOUR == "dies later":
        sys.exit("out of memory")
    if BEHAVIOUR == "hangs":
        threading.Event().wait()
    if log := os.environ.get("FAKE_LOG"):
        with Path(log).open("a", encoding="utf-8") as file:
            file.write(f"{os.environ['FAKE_NAME']} {num_epochs}\n")
    loss = float("nan") if BEHAVIOUR == "diverges" else 1.0
    epoch_s = float(os.environ.get("FAKE_EPOCH_S", "1"))
    answer({"seconds": num_epochs * epoch_s, "steps": num_epochs, "loss": loss})


def answer(message: dict) -> None:
    print(ANSWER_PREFIX + json.dumps(message), flush=True)


def prepare_noisily(options: WorkerOptions) -> Training:
    def run_epochs(num_epochs: int) -> float:
        print(f"{ANSWER_PREFIX} this is none")
        os.write(1, b'{"seconds": 0}\n')
        return 1.0

    return Training(run_epochs, steps_per_epoch=3)


if __name__ == "__main__":
    main()
