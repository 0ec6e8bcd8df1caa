"""Enums and option classes of the public API: reductions, aggregation, input. Imports no JAX."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

from stratagem.errors import check_number, check_type, explain, invalid

__all__ = [
    "AutoShardPolicy",
    "InputContext",
    "InputOptions",
    "InputReplicationMode",
    "ReduceOp",
    "RunOptions",
    "ValueContext",
    "VariableAggregation",
    "VariableSynchronization",
]


class VariableSynchronization(enum.IntEnum):
    """Time at which the copies of a distributed variable are synchronized.

    Keras's strings `"auto"`, `"none"`, `"on_write"` and `"on_read"` are equivalent.

    Example:
        >>> strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> with strategy.scope():
        ...     on_read = sg.VariableSynchronization.ON_READ
        ...     seen = sg.Variable(0.0, synchronization=on_read, aggregation="sum")
        >>> _ = strategy.run(lambda: seen.assign_add(1.0))  # each replica changes its own copy
        >>> float(seen.value)
        2.0

    Source: TF 2.21 variables.py, VariableSynchronization.
    """

    AUTO = 0
    NONE = 1
    ON_WRITE = 2
    ON_READ = 3


class VariableAggregation(enum.IntEnum):
    """Combination of the values that replicas assign to a variable.

    Keras's strings `"none"`, `"sum"`, `"mean"` and `"only_first_replica"` are equivalent.

    Example:
        >>> strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> with strategy.scope():
        ...     total = sg.Variable(0.0, aggregation=sg.VariableAggregation.SUM)
        >>> _ = strategy.run(total.assign, args=(np.float32(2),))  # 2 from each replica
        >>> float(total.value)
        4.0

    Source: TF 2.21 variables.py, VariableAggregationV2.
    """

    NONE = 0
    SUM = 1
    MEAN = 2
    ONLY_FIRST_REPLICA = 3


class ReduceOp(enum.Enum):
    """Reduction over replicas; its name works in its place, in any case: `"sum"`, `"Mean"`.

    Example:
        >>> strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> values = strategy.run(lambda: sg.get_replica_context().replica_id_in_sync_group + 1)
        >>> int(strategy.reduce(sg.ReduceOp.SUM, values, axis=None))
        3
        >>> float(strategy.reduce("mean", values, axis=None))
        1.5

    Source: TF 2.21 reduce_util.py, ReduceOp.
    """

    SUM = "SUM"
    MEAN = "MEAN"

    @staticmethod
    def parse(op: ReduceOp | str) -> ReduceOp:
        """Returns the op for a value, or for a name in any case; raises ValueError for others."""
        if isinstance(op, ReduceOp):
            return op
        name = op.upper() if isinstance(op, str) else ""
        if name not in ReduceOp.__members__:
            raise invalid(
                f"reduce_op={op!r} is not a reduction.",
                expected='ReduceOp.SUM, ReduceOp.MEAN, "sum" or "mean".',
                fix="pass one of these, or use gather and reduce the result yourself.",
            )
        return ReduceOp[name]

    @staticmethod
    def from_variable_aggregation(aggregation: VariableAggregation) -> ReduceOp:
        """Returns the reduction for an aggregation; raises ValueError for NONE.

        ONLY_FIRST_REPLICA becomes MEAN, since replicas hold equal values.
        """
        if aggregation == VariableAggregation.SUM:
            return ReduceOp.SUM
        if aggregation in (VariableAggregation.MEAN, VariableAggregation.ONLY_FIRST_REPLICA):
            return ReduceOp.MEAN
        raise invalid(
            f"aggregation={aggregation!r} has no reduction.",
            expected="SUM, MEAN or ONLY_FIRST_REPLICA.",
            fix="set the variable's aggregation to one of these.",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of `Strategy.run` for TPUs, accepted for compatibility.

    Args:
        experimental_enable_dynamic_batch_size: accepted; every strategy supports uneven batches.
        experimental_bucketizing_dynamic_shape: accepted and ignored.
        experimental_xla_options: accepted and ignored.

    Example:
        >>> strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> options = sg.RunOptions(experimental_enable_dynamic_batch_size=False)
        >>> strategy.run(lambda x: x + 1, args=(np.float32(1),), options=options)
        PerReplica[2.0 | 2.0]

    Source: TF 2.21 distribute_lib.py, RunOptions.
    """

    experimental_enable_dynamic_batch_size: bool = True
    experimental_bucketizing_dynamic_shape: bool = False
    experimental_xla_options: object | None = None


class InputReplicationMode(enum.Enum):
    """Number of calls of the function of `distribute_datasets_from_function`.

    Example:
        >>> def dataset_fn(context):
        ...     print("dataset", context.input_pipeline_id, "of", context.num_input_pipelines)
        ...     return [np.ones(2)]
        >>> mode = sg.InputReplicationMode.PER_WORKER
        >>> strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> dataset = strategy.distribute_datasets_from_function(
        ...     dataset_fn, sg.InputOptions(replication_mode=mode))
        dataset 0 of 1

    Source: TF 2.21 distribute_lib.py, InputReplicationMode.
    """

    PER_WORKER = "PER_WORKER"
    PER_REPLICA = "PER_REPLICA"


@dataclasses.dataclass(frozen=True)
class InputContext:
    """Information for a function that creates a dataset.

    Args:
        num_input_pipelines: total number of datasets.
        input_pipeline_id: index of this dataset, from 0.
        num_replicas_in_sync: number of replicas over all workers.

    Example:
        >>> sg.InputContext(num_replicas_in_sync=4).get_per_replica_batch_size(12)
        3

    Source: TF 2.21 distribute_lib.py, InputContext.
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Returns the batch size of one replica.

        Args:
            global_batch_size: number of examples over all replicas per step.

        Returns:
            `global_batch_size / num_replicas_in_sync`.

        Raises:
            ValueError: `global_batch_size` is not a multiple of the number of replicas.
        """
        size, rest = divmod(global_batch_size, self.num_replicas_in_sync)
        if rest:
            nearest = [n * self.num_replicas_in_sync for n in (size, size + 1) if n]
            raise invalid(
                f"global_batch_size={global_batch_size} is not a multiple of "
                f"{self.num_replicas_in_sync} replicas.",
                expected="a batch size that splits evenly over the replicas.",
                fix=f"use {' or '.join(map(str, nearest))}, or distribute_dataset, which "
                "splits any size.",
                code="SG306",
            )
        return size


class AutoShardPolicy(enum.IntEnum):
    """Split of one dataset's examples between processes.

    OFF: every process reads the whole dataset. AUTO: FILE if there are enough files, otherwise
    DATA. FILE: each process reads its own files. DATA: each process reads everything and keeps its
    part of each batch. HINT: fills in the placeholders of
    `sg.input.Dataset.shard(SHARD_HINT, SHARD_HINT)`.

    Example:
        >>> policy = sg.AutoShardPolicy.DATA  # for distribute_dataset on several processes
        >>> sg.InputOptions(auto_shard_policy=policy).auto_shard_policy.name
        'DATA'

    Source: TF 2.21 data/ops/options.py, AutoShardPolicy.
    """

    OFF = -1
    AUTO = 0
    FILE = 1
    DATA = 2
    HINT = 3


@dataclasses.dataclass(frozen=True, init=False)
class InputOptions:
    """Options for distributed datasets.

    The names are also accepted without `experimental_`.

    Args:
        experimental_fetch_to_device: True to move batches to the devices, False to keep them on the
            host.
        experimental_replication_mode: PER_REPLICA is for `distribute_datasets_from_function`.
        experimental_place_dataset_on_device: accepted only with PER_REPLICA and without fetching,
            as in TensorFlow, and ignored: the host always reads the dataset.
        experimental_per_replica_buffer_size: number of batches to prefetch in a thread, unless
            loading one and its step take less than 0.25 ms. Small batches of arrays in memory are
            transferred 16 at a time. On accelerators it is one batch more, because a transfer waits
            for the steps before it. 0 reads each batch in the caller's thread when it is needed.
        auto_shard_policy: how several processes split the examples. AUTO follows a `tf.data`
            dataset's own option.
        input_workers: number of `sg.input.service` workers that read the dataset, started with it,
            unless `STRATAGEM_INPUT_SERVICE` names a running service. With more than one, batches
            come from their splits in turn. 0 reads it in this process.

    Raises:
        TypeError: an unknown name, or a mode, policy or number of another type.
        ValueError: a negative number, or a dataset on a device without PER_REPLICA or with
            fetching.

    Example:
        >>> strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> options = sg.InputOptions(fetch_to_device=False, per_replica_buffer_size=4)
        >>> dataset = strategy.distribute_dataset([np.arange(4)], options)
        >>> type(next(iter(dataset)).stacked).__name__
        'ndarray'

    Source: TF 2.21 distribute_lib.py, InputOptions.
    """

    experimental_fetch_to_device: bool
    experimental_replication_mode: InputReplicationMode
    experimental_place_dataset_on_device: bool
    experimental_per_replica_buffer_size: int
    auto_shard_policy: AutoShardPolicy
    input_workers: int

    def __init__(
        self,
        experimental_fetch_to_device: bool = True,
        experimental_replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER,
        experimental_place_dataset_on_device: bool = False,
        experimental_per_replica_buffer_size: int = 1,
        *,
        auto_shard_policy: AutoShardPolicy = AutoShardPolicy.AUTO,
        input_workers: int = 0,
        **short_names: object,
    ) -> None:
        values: dict[str, Any] = {
            "experimental_fetch_to_device": experimental_fetch_to_device,
            "experimental_replication_mode": experimental_replication_mode,
            "experimental_place_dataset_on_device": experimental_place_dataset_on_device,
            "experimental_per_replica_buffer_size": experimental_per_replica_buffer_size,
        }
        for name, value in short_names.items():
            if (full_name := f"experimental_{name}") not in values:
                raise TypeError(
                    explain(
                        f"InputOptions received the unknown option {name}={value!r}.",
                        expected=f"names among {[name[13:] for name in values]}, with or without "
                        '"experimental_".',
                        fix="correct the name.",
                    )
                )
            values[full_name] = value
        values |= {"auto_shard_policy": auto_shard_policy, "input_workers": input_workers}
        for name, value in values.items():
            object.__setattr__(self, name, value)
        self._check()

    def _check(self) -> None:
        for name, kind in (
            ("experimental_replication_mode", InputReplicationMode),
            ("auto_shard_policy", AutoShardPolicy),
        ):
            fix = f"pass one of {[f'sg.{kind.__name__}.{one.name}' for one in kind]}."
            check_type(name, getattr(self, name), kind, f"an sg.{kind.__name__}", fix)
        for name, unit in (
            ("experimental_per_replica_buffer_size", "batches to prefetch"),
            ("input_workers", "processes that read the dataset"),
        ):
            check_type(name, value := getattr(self, name), int, f"a number of {unit}")
            check_number("InputOptions", 0, **{name: value})
        on_device = self.experimental_place_dataset_on_device
        per_replica = self.experimental_replication_mode is InputReplicationMode.PER_REPLICA
        if on_device and (self.experimental_fetch_to_device or not per_replica):
            raise invalid(
                "experimental_place_dataset_on_device=True was given with "
                f"experimental_fetch_to_device={self.experimental_fetch_to_device} and "
                f"{self.experimental_replication_mode}.",
                expected="experimental_fetch_to_device=False and PER_REPLICA.",
                fix="omit experimental_place_dataset_on_device; batches are prefetched to the "
                "devices without it.",
            )

    @property
    def fetch_to_device(self) -> bool:
        """Short for `experimental_fetch_to_device`."""
        return self.experimental_fetch_to_device

    @property
    def replication_mode(self) -> InputReplicationMode:
        """Short for `experimental_replication_mode`."""
        return self.experimental_replication_mode

    @property
    def place_dataset_on_device(self) -> bool:
        """Short for `experimental_place_dataset_on_device`."""
        return self.experimental_place_dataset_on_device

    @property
    def per_replica_buffer_size(self) -> int:
        """Short for `experimental_per_replica_buffer_size`."""
        return self.experimental_per_replica_buffer_size


@dataclasses.dataclass(frozen=True)
class ValueContext:
    """Replica information passed to the function of `distribute_values_from_function`.

    Args:
        replica_id_in_sync_group: index of the replica, from 0.
        num_replicas_in_sync: number of replicas.

    Example:
        >>> strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> def value_fn(context):
        ...     return context.replica_id_in_sync_group / context.num_replicas_in_sync
        >>> strategy.distribute_values_from_function(value_fn)
        PerReplica[0.0 | 0.5]

    Source: TF 2.21 distribute_lib.py, ValueContext.
    """

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1
