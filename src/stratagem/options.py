"""Choices that a caller hands over as values: reductions, and how variables are kept and combined.

Nothing here imports JAX.
"""

from __future__ import annotations

import dataclasses
import enum

from stratagem.messages import explain

__all__ = [
    "ReduceOp",
    "RunOptions",
    "VariableAggregation",
    "VariableSynchronization",
]


class VariableSynchronization(enum.IntEnum):
    """When the copies of a distributed variable are brought together.

    Keras's strings `"auto"`, `"none"`, `"on_write"` and `"on_read"` mean the same.

    Source: TF 2.21 variables.py, VariableSynchronization.
    """

    AUTO = 0
    NONE = 1
    ON_WRITE = 2
    ON_READ = 3


class VariableAggregation(enum.IntEnum):
    """How the values that replicas contribute to a variable are combined.

    Keras's strings `"none"`, `"sum"`, `"mean"` and `"only_first_replica"` mean the same.

    Source: TF 2.21 variables.py, VariableAggregationV2.
    """

    NONE = 0
    SUM = 1
    MEAN = 2
    ONLY_FIRST_REPLICA = 3


class ReduceOp(enum.Enum):
    """How values of several replicas are combined.

    Wherever an op is taken, its name works too, in any case: `"sum"`, `"Mean"`.

    Source: TF 2.21 reduce_util.py, ReduceOp.
    """

    SUM = "SUM"
    MEAN = "MEAN"

    @staticmethod
    def parse(op: ReduceOp | str) -> ReduceOp:
        """Returns the op that a value or a name stands for.

        Args:
            op: a `ReduceOp`, or its name in any case.

        Returns:
            The op.

        Raises:
            ValueError: no such op.
        """
        if isinstance(op, ReduceOp):
            return op
        name = op.upper() if isinstance(op, str) else ""
        if name not in ReduceOp.__members__:
            raise ValueError(
                explain(
                    f"reduce_op={op!r} is not a reduction.",
                    expected='ReduceOp.SUM, ReduceOp.MEAN, "sum" or "mean".',
                    fix="pass one of these; for any other reduction, gather and reduce the result.",
                )
            )
        return ReduceOp[name]

    @staticmethod
    def from_variable_aggregation(aggregation: VariableAggregation) -> ReduceOp:
        """Returns the reduction that an aggregation asks for.

        Args:
            aggregation: SUM, MEAN, or ONLY_FIRST_REPLICA (all replicas agree, so a mean does).

        Returns:
            The op.

        Raises:
            ValueError: aggregation NONE, which names no reduction.
        """
        if aggregation == VariableAggregation.SUM:
            return ReduceOp.SUM
        if aggregation in (VariableAggregation.MEAN, VariableAggregation.ONLY_FIRST_REPLICA):
            return ReduceOp.MEAN
        raise ValueError(
            explain(
                f"aggregation={aggregation!r} names no reduction.",
                expected="SUM, MEAN or ONLY_FIRST_REPLICA.",
                fix="give the variable an aggregation.",
            )
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Hints for `Strategy.run` that only TPUs use.

    Args:
        experimental_enable_dynamic_batch_size: accepted; every strategy takes uneven batches.
        experimental_bucketizing_dynamic_shape: accepted and ignored.
        experimental_xla_options: accepted and ignored.

    Source: TF 2.21 distribute_lib.py, RunOptions.
    """

    experimental_enable_dynamic_batch_size: bool = True
    experimental_bucketizing_dynamic_shape: bool = False
    experimental_xla_options: object | None = None
