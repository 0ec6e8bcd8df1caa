"""Errors for invalid assignments to a strategy's variables."""

from __future__ import annotations

from stratagem.messages import explain


def delta_outside(method: str, path: str) -> ValueError:
    """Error for a delta assigned to an ON_READ sum in cross-replica context."""
    return ValueError(
        explain(
            f"{method} was called in cross-replica context on {path!r}, an ON_READ variable with "
            "aggregation SUM.",
            expected="assign, or a call in a replica function: outside of one, it is unclear "
            "whether the value counts once or once per replica.",
            fix="use assign(variable + value), or call it in the function passed to strategy.run.",
            code="SG205",
        )
    )


def parts_in_replica(path: str) -> TypeError:
    """Error for a `PerReplica` assigned in a replica function."""
    return TypeError(
        explain(
            f"A PerReplica was assigned to {path!r} in a replica function.",
            expected="this replica's part.",
            fix="pass the PerReplica through `args` of strategy.run.",
            code="SG206",
        )
    )


def parts_without_aggregation(path: str) -> TypeError:
    """Error for a `PerReplica` assigned to a variable without aggregation."""
    return TypeError(
        explain(
            f"A PerReplica was assigned to {path!r}, whose aggregation is NONE.",
            expected="a plain value, or a variable with an aggregation.",
            fix='reduce the value first, or create the variable with aggregation="sum" or "mean".',
            code="SG204",
        )
    )


def number_to_sum(value: object, path: str) -> ValueError:
    """Error for a Python number assigned to a SUM variable: once, or once per replica?"""
    return ValueError(
        explain(
            f"A replica function assigned the Python number {value!r} to {path!r}, "
            "whose "
            "aggregation is SUM.",
            expected="an array, which counts once a replica.",
            fix="pass an array (jax.numpy.asarray), or divide by num_replicas_in_sync "
            "if the number "
            "is meant once.",
            code="SG205",
        )
    )
