"""Measures `sg.embedding.reshard`: rows a second, and the pause of training beside it.

    python -m benchmarks.reshard.move_run --rows 1000000

The servers are processes of this machine. One thread trains with Adagrad, by pulls and pushes of
random keys, while the table moves.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from typing import Any

import stratagem as sg  # isort: skip - before keras, because it selects the JAX backend

import keras
import numpy as np

from benchmarks.tiers.table_run import keys_of
from stratagem.parameter_server.keras.optimizer import give_to_servers

_FILLED = 50_000  # rows of a push that fills the table


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    servers, moves = max(options.servers), []
    with sg.HybridStrategy(placement={"table": "server"}, num_servers=servers) as strategy:
        with strategy.scope():
            table = sg.embedding.DynamicEmbedding(options.width, name="table")
            table.build()
            optimizer = keras.optimizers.Adagrad(0.1)
            optimizer.build([table.embeddings])
            give_to_servers(optimizer)
        client = strategy.placement.remote.variables.client
        (name,) = [one.name for one in client.layouts if one.is_keyed]
        optimizers = dict.fromkeys([name], client.optimizers_of(client.placement_of(name))[0])
        sg.embedding.reshard(options.servers[0], strategy=strategy)

        def push(ranks: np.ndarray) -> None:
            grads = np.ones((len(ranks), options.width), np.float32)
            keys = keys_of(ranks, options.rows)
            client.push({}, {name: (keys, grads)}, optimizers=optimizers)

        for first in range(0, options.rows, _FILLED):
            push(np.arange(first, min(options.rows, first + _FILLED)))
        for number in options.servers[1:]:
            for is_training in (False, True):
                if is_training:  # the same move again
                    back = client.placement_of(name)
                    sg.embedding.reshard(moves[-1]["from"], strategy=strategy)
                    assert len(back.servers) == number
                moves.append(_moved(strategy, push, number, name, options, is_training))
                print(json.dumps(moves[-1]), flush=True)
    return moves


def _moved(
    strategy: Any, push: Any, number: int, name: str, options: Any, is_training: bool
) -> dict[str, Any]:
    client = strategy.placement.remote.variables.client
    random, steps_s = np.random.default_rng(0), []
    is_over = threading.Event()

    def train() -> None:
        while not is_over.is_set():
            ranks = random.choice(options.rows, options.batch, replace=False)
            begin_s = time.perf_counter()
            client.pull_rows(name, keys_of(ranks, options.rows))
            push(ranks)
            steps_s.append(time.perf_counter() - begin_s)

    thread = threading.Thread(target=train)
    if is_training:
        thread.start()
        time.sleep(3)
    begun = len(steps_s)
    first = len(client.placement_of(name).servers)
    cpu_s = time.process_time()
    moved = sg.embedding.reshard(number, strategy=strategy)
    cpu_s = time.process_time() - cpu_s
    ended = len(steps_s)
    if is_training:
        time.sleep(2)
        is_over.set()
        thread.join()
    found: dict[str, Any] = {
        "from": first,
        "to": number,
        "rows": options.rows,
        "sent_rows": moved.rows,
        "megabytes": round(moved.size_bytes / 1e6, 1),
        "seconds": round(moved.duration_s, 2),
        "rows_per_s": round(moved.rows / moved.duration_s),
        "pause_s": round(moved.pause_s, 3),
        "client_cpu_s": round(cpu_s, 2),
        "load": round(os.getloadavg()[0], 1),
    }
    if is_training:
        found["steps_before_ms"] = _milliseconds(steps_s[:begun])
        found["steps_meanwhile_ms"] = _milliseconds(steps_s[begun : ended + 1])
    return found


def _milliseconds(steps_s: list[float]) -> dict[str, float]:
    return {
        "count": len(steps_s),
        "median": round(1e3 * float(np.median(steps_s)), 1),
        "most": round(1e3 * max(steps_s), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--batch", type=int, default=2000)
    parser.add_argument("--servers", type=int, nargs="+", default=[2, 3, 1])
    measure(parser.parse_args())


if __name__ == "__main__":
    main()
