"""Variable kinds, chosen from annotations, and parsing of these annotations.

=====================  ==============  =========================
strategy               AUTO, ON_WRITE  ON_READ
=====================  ==============  =========================
one replica            PLAIN           PLAIN
several replicas       MIRRORED        ON_READ, one per replica
=====================  ==============  =========================
"""

from __future__ import annotations

import enum
from typing import TypeVar

from stratagem.messages import explain
from stratagem.options import VariableAggregation, VariableSynchronization

_E = TypeVar("_E", bound=enum.IntEnum)


class VariableKind(enum.Enum):
    """Form in which a variable is stored.

    PLAIN: an array on one device. MIRRORED: a copy on every device. ON_READ: an array of shape
    (num_replicas, ...), with one component per device.
    """

    PLAIN = "plain"
    MIRRORED = "mirrored"
    ON_READ = "on_read"


def _parse(value: object, kind: type[_E], argument: str) -> _E:
    if value is None:
        return kind["NONE"]
    if isinstance(value, str) and value.upper() in kind.__members__:
        return kind[value.upper()]
    is_other = isinstance(value, bool) or (
        isinstance(value, enum.Enum) and not isinstance(value, kind)
    )
    if isinstance(value, int) and not is_other and value in list(kind):
        return kind(value)
    names = ", ".join(f'"{name.lower()}"' for name in kind.__members__)
    raise ValueError(
        explain(
            f"{argument}={value!r} is not a valid value.",
            expected=f"a {kind.__name__}, or one of {names}.",
            fix=f"pass one of these for {argument}.",
        )
    )


def parse_synchronization(value: object) -> VariableSynchronization:
    """Parses a member, an int, a string in any case, or None for NONE."""
    return _parse(value, VariableSynchronization, "synchronization")


def parse_aggregation(value: object) -> VariableAggregation:
    """Parses a member, an int, a string in any case, or None for NONE."""
    return _parse(value, VariableAggregation, "aggregation")


def choose_kind(
    synchronization: VariableSynchronization,
    aggregation: VariableAggregation,
    *,
    dtype: str,
    num_replicas: int,
    name: str,
) -> VariableKind:
    """Chooses the kind of a new variable from its annotations.

    Raises ValueError if they are invalid for several replicas. Source: TF 2.21 distribute_lib.py,
    creator_with_resource_vars; values_util.py.
    """
    if num_replicas == 1:
        return VariableKind.PLAIN
    if synchronization is VariableSynchronization.NONE:
        raise ValueError(
            explain(
                f"Variable {name!r} has synchronization NONE under a strategy of {num_replicas} "
                "replicas.",
                expected="AUTO, ON_WRITE or ON_READ: without these, the copies would diverge.",
                fix='omit `synchronization`, or pass "on_read" for one value per replica.',
            )
        )
    is_fractional = dtype.startswith(("float", "bfloat", "complex"))
    if aggregation is VariableAggregation.MEAN and not is_fractional:
        raise ValueError(
            explain(
                f"Variable {name!r} has aggregation MEAN and dtype {dtype}.",
                expected="a floating-point dtype: the mean of integers may not be an integer.",
                fix='choose a float dtype, or aggregation "sum" or "only_first_replica".',
            )
        )
    on_read = synchronization is VariableSynchronization.ON_READ
    return VariableKind.ON_READ if on_read else VariableKind.MIRRORED
