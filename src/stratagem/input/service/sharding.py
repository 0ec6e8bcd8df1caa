"""`ShardingPolicy`: how input workers share the data of a job."""

from __future__ import annotations

import enum

from stratagem.messages import explain


class ShardingPolicy(enum.IntEnum):
    """The way in which the input workers of a job share its data.

    OFF: each worker reads all data, so each batch comes once per worker. DYNAMIC: workers take the
    next file, or the next few batches, when they are free; each batch comes once. FILE, DATA,
    FILE_OR_DATA and HINT divide the data in advance among `DispatcherConfig.worker_addresses`: by
    file, by every nth batch, by file if there are enough, and by `Dataset.shard` with `SHARD_HINT`.

    Example:
        >>> sg.input.service.ShardingPolicy.DYNAMIC.name
        'DYNAMIC'

    Source: TF 2.21 data_service_ops.py, ShardingPolicy.
    """

    OFF = 0
    DYNAMIC = 1
    FILE = 2
    DATA = 3
    FILE_OR_DATA = 4
    HINT = 5

    @property
    def is_static(self) -> bool:
        """True if the data are divided in advance."""
        return self >= ShardingPolicy.FILE


# TensorFlow's earlier names.
_MODES = {
    "parallel_epochs": ShardingPolicy.OFF,
    "distributed_epoch": ShardingPolicy.DYNAMIC,
}


def checked_policy(processing_mode: object) -> ShardingPolicy:
    """Returns a valid policy: a `ShardingPolicy`, "parallel_epochs" or "distributed_epoch"."""
    if isinstance(processing_mode, ShardingPolicy):
        return processing_mode
    if isinstance(processing_mode, str) and processing_mode in _MODES:
        return _MODES[processing_mode]
    raise ValueError(
        explain(
            f"processing_mode={processing_mode!r} is no sharding policy.",
            expected='a ShardingPolicy, "parallel_epochs" or "distributed_epoch".',
            fix="pass sg.input.service.ShardingPolicy.DYNAMIC, which reads each batch once.",
        )
    )
