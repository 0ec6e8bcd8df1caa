"""Which kind a variable is: the whole table, and what no kind fits."""

from __future__ import annotations

import itertools

import pytest

from stratagem.options import VariableAggregation, VariableSynchronization
from stratagem.variables.registry import (
    VariableKind,
    choose_kind,
    parse_aggregation,
    parse_synchronization,
)

AUTO, NONE, ON_WRITE, ON_READ = VariableSynchronization
KINDS = {
    AUTO: VariableKind.MIRRORED,
    ON_WRITE: VariableKind.MIRRORED,
    ON_READ: VariableKind.ON_READ,
}


def kind_of(synchronization, aggregation, *, dtype="float32", num_replicas=2) -> VariableKind:
    return choose_kind(
        synchronization, aggregation, dtype=dtype, num_replicas=num_replicas, name="layer/v"
    )


@pytest.mark.parametrize("synchronization", KINDS)
def test_kind_follows_from_the_synchronization_whatever_the_aggregation(synchronization) -> None:
    for aggregation, num_replicas in itertools.product(VariableAggregation, (2, 8)):
        kind = kind_of(synchronization, aggregation, num_replicas=num_replicas)
        assert kind is KINDS[synchronization]


def test_one_replica_has_plain_variables_and_no_rules() -> None:
    for synchronization, aggregation, dtype in itertools.product(
        VariableSynchronization, VariableAggregation, ("float32", "int32", "bool")
    ):
        kind = kind_of(synchronization, aggregation, dtype=dtype, num_replicas=1)
        assert kind is VariableKind.PLAIN


@pytest.mark.parametrize("aggregation", VariableAggregation)
def test_synchronization_none_is_refused(aggregation) -> None:
    with pytest.raises(
        ValueError, match=r"'layer/v' has synchronization NONE under a strategy of 2(?s:.)*on_read"
    ):
        kind_of(NONE, aggregation)


@pytest.mark.parametrize("dtype", ["int8", "int32", "uint8", "int64", "bool"])
@pytest.mark.parametrize("synchronization", KINDS)
def test_mean_of_whole_numbers_is_refused(synchronization, dtype) -> None:
    with pytest.raises(ValueError, match=f"'layer/v' has aggregation MEAN and dtype {dtype}"):
        kind_of(synchronization, VariableAggregation.MEAN, dtype=dtype)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "complex64", "float8_e4m3fn"])
def test_mean_of_fractional_numbers_is_fine(dtype) -> None:
    assert kind_of(AUTO, VariableAggregation.MEAN, dtype=dtype) is VariableKind.MIRRORED


@pytest.mark.parametrize("aggregation", ["SUM", "NONE", "ONLY_FIRST_REPLICA"])
def test_whole_numbers_may_be_aggregated_otherwise(aggregation) -> None:
    kind = kind_of(ON_READ, VariableAggregation[aggregation], dtype="int32")
    assert kind is VariableKind.ON_READ


@pytest.mark.parametrize(
    ("parse", "kind"),
    [
        (parse_synchronization, VariableSynchronization),
        (parse_aggregation, VariableAggregation),
    ],
)
def test_member_name_and_number_are_understood(parse, kind) -> None:
    for member in kind:
        assert parse(member) is member
        assert parse(member.name.lower()) is member
        assert parse(member.name) is member
        assert parse(int(member)) is member
    assert parse(None) is kind.NONE


@pytest.mark.parametrize(
    "value", ["", "sometimes", 4, -1, True, 1.0, VariableAggregation.MEAN], ids=repr
)
def test_unknown_synchronization_is_refused_with_those_there_are(value) -> None:
    known = 'one of "auto", "none", "on_write", "on_read"'
    with pytest.raises(ValueError, match=f"synchronization=.* is not a valid value(?s:.)*{known}"):
        parse_synchronization(value)


@pytest.mark.parametrize("value", ["max", 4, False, VariableSynchronization.ON_READ], ids=repr)
def test_unknown_aggregation_is_refused_with_those_there_are(value) -> None:
    known = 'one of "none", "sum", "mean", "only_first_replica"'
    with pytest.raises(ValueError, match=f"aggregation=.* is not a valid value(?s:.)*{known}"):
        parse_aggregation(value)
