"""Ours: rows of a table on two parameter servers, looked up and updated by this process.

The servers are processes of their own, and end with this one.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from typing import Any

import stratagem as sg  # isort: skip - before keras, because it selects the JAX backend

import keras
import numpy as np

from benchmarks.workers.parameter_server_work import (
    LEARNING_RATE,
    NUM_BATCHES,
    ClusterOptions,
    answer_work,
    id_batches,
    require_equal,
)
from benchmarks.workers.protocol import serve_questions
from benchmarks.workers.server_processes import server_cpu_s, start_server
from stratagem.group.transport.connection import Connections
from stratagem.group.transport.endpoints import ClusterKeys
from stratagem.parameter_server.client.client import ServerClient
from stratagem.parameter_server.client.shard_layout import ShardPlacer
from stratagem.parameter_server.keras.update_rule import KerasUpdate

__all__ = ["first_values", "prepare", "start_servers"]

_OPTIMIZERS = {"sgd": keras.optimizers.SGD, "adagrad": keras.optimizers.Adagrad}


def prepare() -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Starts the servers; answers how long work takes on them."""
    options = ClusterOptions(**json.loads(sys.argv[1]))
    keys = ClusterKeys.make()
    served = ServerClient(Connections(keys, start_servers(options.num_servers, keys)))
    placer = ShardPlacer(
        options.num_servers, sg.partitioners.FixedShardsPartitioner(options.num_servers)
    )
    row_size = options.row_size
    placement = placer.place("table", (options.table_rows, row_size), "float32", has_rows=True)
    served.create(placement, functools.partial(first_values, row_size=row_size))
    rule = KerasUpdate(_OPTIMIZERS[options.optimizer](LEARNING_RATE))
    served.set_rule(rule, ["table"])
    batches_of = functools.cache(lambda num_ids: id_batches(num_ids, options))
    distinct_of = functools.cache(
        lambda num_ids: [len(np.unique(ids)) for ids in batches_of(num_ids)]
    )

    def per_server_s(question: dict[str, Any], begun_s: float) -> dict[str, float]:
        """Returns how many rows crossed for each second of the servers' processors."""
        counts = distinct_of(question["num_ids"])
        num_rows = sum(counts[number % NUM_BATCHES] for number in range(question["amount"]))
        return {"rows_per_server_s": num_rows / max(server_cpu_s() - begun_s, 1e-9)}

    def pull(question: dict[str, Any]) -> dict[str, float]:
        batches, begun_s = batches_of(question["num_ids"]), server_cpu_s()
        last = np.zeros(row_size, np.float32)
        for number in range(question["amount"]):
            last = served.pull_rows("table", batches[number % NUM_BATCHES])[-1]
        wanted = batches[(question["amount"] - 1) % NUM_BATCHES, -1]
        require_equal("the last row", last, np.full(row_size, wanted, np.float32))
        return per_server_s(question, begun_s)

    def push(question: dict[str, Any]) -> dict[str, float]:
        batches, begun_s = batches_of(question["num_ids"]), server_cpu_s()
        gradients = np.ones((question["num_ids"], row_size), np.float32)
        for number in range(question["amount"]):
            served.push({}, {"table": (batches[number % NUM_BATCHES], gradients)})
        return per_server_s(question, begun_s)

    return answer_work({"pull_rows": pull, "push_rows": push})


def first_values(first_row: int, num_rows: int, *, row_size: int) -> np.ndarray[Any, Any]:
    """Returns rows of the table as it begins: each is its own number."""
    numbers = np.arange(first_row, first_row + num_rows, dtype=np.float32)
    return np.repeat(numbers[:, None], row_size, axis=1)


def start_servers(count: int, keys: ClusterKeys) -> list[str]:
    """Starts parameter servers and returns their addresses."""
    processes = [start_server("stratagem_server") for _ in range(count)]
    addresses: list[str] = []
    for process in processes:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(keys.secret.hex() + "\n")
        process.stdin.flush()
        addresses.append(process.stdout.readline().strip())
    return addresses


if __name__ == "__main__":
    serve_questions(prepare)
