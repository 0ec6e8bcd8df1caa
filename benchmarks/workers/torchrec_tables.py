"""Peer: a table of TorchRec, sharded by rows over processes that all look rows up.

Each process asks for its part of a batch, so that a step looks up as many ids as that of other
sides. An `EmbeddingBagCollection` with one id a bag is four times as fast here as an
`EmbeddingCollection`, and both compute the same.
"""

from __future__ import annotations

import functools
import os
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

from benchmarks.workers.cluster_work import (
    LEARNING_RATE,
    NUM_BATCHES,
    Array,
    ClusterOptions,
    first_rows,
    id_batches,
    resident_bytes,
    serve_rows,
)

_FILLED_AT_ONCE = 1_000_000


class _SharedRows:
    """The part of the table that one of the processes has."""

    def __init__(self, options: ClusterOptions) -> None:
        self._options = options
        world = options.num_servers
        # The processes compute at the same time, and share the cores.
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // world))
        dist.init_process_group("gloo")
        os.environ["LOCAL_WORLD_SIZE"] = str(world)
        config = torchrec.EmbeddingBagConfig(
            name="table",
            embedding_dim=options.row_size,
            num_embeddings=options.table_rows,
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
        # Without the memory of a process that has only imported its modules.
        self.row_bytes = (resident_bytes([0]) - _imported_bytes) / options.table_rows
        self._batches = functools.cache(self._make_batches)
        self._ones = functools.cache(lambda shape: torch.ones(shape))

    def pull(self, num_ids: int, amount: int) -> Array:
        return self._run(num_ids, amount, is_step=False)

    def step(self, num_ids: int, amount: int) -> Array:
        return self._run(num_ids, amount, is_step=True)

    def push(self, num_ids: int, amount: int) -> None:
        raise NotImplementedError("Its rows are updated by the gradient of a lookup.")

    def _run(self, num_ids: int, amount: int, *, is_step: bool) -> Array:
        """Looks up this process's part of batches, and updates it in a step."""
        batches = self._batches(num_ids)
        for number in range(amount):
            with torch.set_grad_enabled(is_step):
                rows = self._bags(batches[number % NUM_BATCHES]).wait()["ids"]
            if is_step:
                rows.backward(self._ones(rows.shape))
        return rows.detach().numpy()

    def _make_batches(self, num_ids: int) -> list[Any]:
        """Returns the first part of the ids for the first process, and so on."""
        ids = id_batches(num_ids, self._options)
        own = np.array_split(ids, self._options.num_servers, axis=1)[dist.get_rank()]
        lengths = torch.ones(own.shape[1], dtype=torch.int32)
        return [
            KeyedJaggedTensor(["ids"], torch.from_numpy(one.copy()), lengths=lengths) for one in own
        ]


_imported_bytes = resident_bytes([0])

if __name__ == "__main__":
    serve_rows(_SharedRows)
