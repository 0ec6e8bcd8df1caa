"""Reductions, and how variables are kept and combined."""

from __future__ import annotations

import dataclasses

import pytest

from stratagem.options import ReduceOp, RunOptions, VariableAggregation, VariableSynchronization


def test_members_have_tensorflow_s_numbers() -> None:
    assert {member.name: int(member) for member in VariableSynchronization} == {
        "AUTO": 0,
        "NONE": 1,
        "ON_WRITE": 2,
        "ON_READ": 3,
    }
    assert {member.name: int(member) for member in VariableAggregation} == {
        "NONE": 0,
        "SUM": 1,
        "MEAN": 2,
        "ONLY_FIRST_REPLICA": 3,
    }
    assert [member.name for member in ReduceOp] == ["SUM", "MEAN"]


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (ReduceOp.SUM, ReduceOp.SUM),
        ("SUM", ReduceOp.SUM),
        ("sum", ReduceOp.SUM),
        ("Mean", ReduceOp.MEAN),
        ("mEAN", ReduceOp.MEAN),
    ],
)
def test_reduction_is_known_by_its_name_in_any_case(op, expected) -> None:
    assert ReduceOp.parse(op) is expected


@pytest.mark.parametrize("op", ["max", "", " sum", None, 0, VariableAggregation.SUM], ids=repr)
def test_unknown_reduction_is_refused_with_those_there_are(op) -> None:
    with pytest.raises(
        ValueError, match=r'is not a reduction(?s:.)*ReduceOp.SUM, ReduceOp.MEAN, "s'
    ):
        ReduceOp.parse(op)


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [("SUM", ReduceOp.SUM), ("MEAN", ReduceOp.MEAN), ("ONLY_FIRST_REPLICA", ReduceOp.MEAN)],
)
def test_aggregation_asks_for_a_reduction(aggregation, expected) -> None:
    assert ReduceOp.from_variable_aggregation(VariableAggregation[aggregation]) is expected


def test_aggregation_none_asks_for_no_reduction() -> None:
    with pytest.raises(
        ValueError, match=r"names no reduction(?s:.)*give the variable an aggregation"
    ):
        ReduceOp.from_variable_aggregation(VariableAggregation.NONE)


def test_run_options_have_tensorflow_s_fields_and_cannot_be_changed() -> None:
    assert dataclasses.asdict(RunOptions()) == {
        "experimental_enable_dynamic_batch_size": True,
        "experimental_bucketizing_dynamic_shape": False,
        "experimental_xla_options": None,
    }
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field"):
        RunOptions().experimental_xla_options = 1
