"""Peer: a table of TorchRec, sharded by rows over processes that all look rows up.

Each process asks for its part of a batch, so that a step looks up as many ids as that of other
sides. An `EmbeddingBagCollection` with one id a bag is four times as fast here as an
`EmbeddingCollection`, and both compute the same.
"""

from __future__ import annotations

import functools
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torchrec
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingEnv
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.workers.protocol import serve_questions
from benchmarks.workers.server_processes import server_cpu_s, server_ids, start_server
from benchmarks.workers.table_work import (
    LEARNING_RATE,
    Table,
    TableOptions,
    answer_tables,
    first_rows,
    id_batches,
    loopback_bytes,
    own_loopback,
    resident_bytes,
)

__all__ = ["prepare"]

_PULL, _STEP = 0, 1
_FILLED_AT_ONCE = 1_000_000


class _Rank:
    """One of the processes that share the table."""

    def __init__(self, options: TableOptions, rank: int, port: int) -> None:
        self._options, self._rank = options, rank
        world = options.num_holders
        # The processes compute at the same time, and share the cores.
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // world))
        dist.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world
        )
        os.environ["LOCAL_WORLD_SIZE"] = str(world)
        config = torchrec.EmbeddingBagConfig(
            name="table",
            embedding_dim=options.row_size,
            num_embeddings=options.num_rows,
            feature_names=["ids"],
        )
        bags = torchrec.EmbeddingBagCollection(tables=[config], device=torch.device("meta"))
        # TorchRec divides gradients by the number of processes.
        fused = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": LEARNING_RATE * world}
        sharder = EmbeddingBagCollectionSharder(fused_params=fused)
        plan = construct_module_sharding_plan(
            bags,
            {"table": row_wise(compute_kernel="fused")},
            sharder=sharder,
            local_size=world,
            world_size=world,
            device_type="cpu",
        )
        env = ShardingEnv.from_process_group(dist.group.WORLD)
        self._bags = sharder.shard(bags, plan, env, torch.device("cpu"))
        weight = self._bags.state_dict()["embedding_bags.table.weight"]
        for shard in weight.local_shards():
            begin, count = shard.metadata.shard_offsets[0], shard.metadata.shard_sizes[0]
            for first in range(0, count, _FILLED_AT_ONCE):
                some = min(_FILLED_AT_ONCE, count - first)
                rows = first_rows(begin + first, some, options.row_size)
                shard.tensor[first : first + some] = torch.from_numpy(rows)
        self._batches = functools.cache(self._make_batches)
        self._ones = functools.cache(lambda shape: torch.ones(shape))

    def run(self, kind: int, num_ids: int, batch: int) -> Any:
        """Looks up this process's part of a batch, and updates it unless `kind` is a pull."""
        with torch.set_grad_enabled(kind == _STEP):
            rows = self._bags(self._batches(num_ids)[batch]).wait()["ids"]
        if kind == _STEP:
            rows.backward(self._ones(rows.shape))
        return rows

    def _make_batches(self, num_ids: int) -> list[Any]:
        """Returns the first part of the ids for the first process, and so on."""
        ids = id_batches(num_ids, self._options.num_rows)
        own = np.array_split(ids, self._options.num_holders, axis=1)[self._rank]
        lengths = torch.ones(own.shape[1], dtype=torch.int32)
        return [
            KeyedJaggedTensor(["ids"], torch.from_numpy(one.copy()), lengths=lengths) for one in own
        ]


def prepare() -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Starts the other processes and makes the table."""
    options = TableOptions(**json.loads(sys.argv[1]))
    own_loopback()
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    for rank in range(1, options.num_holders):
        start_server("torchrec_tables", sys.argv[1], str(rank), str(port))
    rank = _Rank(options, 0, port)
    others = server_ids()

    def run(kind: int, num_ids: int, batch: int) -> np.ndarray[Any, Any]:
        dist.broadcast(torch.tensor([kind, num_ids, batch]), 0)
        return rank.run(kind, num_ids, batch).detach().numpy()

    # Without the memory of a process that has only imported its modules.
    dist.barrier()
    row_bytes = _grown_bytes(others) / options.num_rows
    table = Table(
        pull=lambda num_ids, batch: run(_PULL, num_ids, batch),
        step=lambda num_ids, batch: run(_STEP, num_ids, batch),
        cpu_s=lambda: time.process_time() + server_cpu_s(),
        sent_bytes=loopback_bytes,
        row_bytes=row_bytes,
    )
    return answer_tables(table, options)


def _grown_bytes(others: list[int]) -> int:
    return resident_bytes([0, *others]) - _imported_bytes * (1 + len(others))


def _follow() -> None:
    """Does what the first process says, until that ends."""
    rank = _Rank(TableOptions(**json.loads(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3]))
    dist.barrier()
    message = torch.zeros(3, dtype=torch.int64)
    while True:
        dist.broadcast(message, 0)
        rank.run(*message.tolist())


_imported_bytes = resident_bytes([0])

if __name__ == "__main__":
    if len(sys.argv) > 2:
        _follow()
    serve_questions(prepare)
