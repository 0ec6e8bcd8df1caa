"""Reductions, variable aggregation and input options."""

from __future__ import annotations

import dataclasses

import pytest

from stratagem.options import (
    AutoShardPolicy,
    InputContext,
    InputOptions,
    InputReplicationMode,
    ReduceOp,
    RunOptions,
    VariableAggregation,
    VariableSynchronization,
)


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
    with pytest.raises(ValueError, match=r"has no reduction(?s:.)*set the variable's aggregation"):
        ReduceOp.from_variable_aggregation(VariableAggregation.NONE)


def test_run_options_have_tensorflow_s_fields_and_cannot_be_changed() -> None:
    assert dataclasses.asdict(RunOptions()) == {
        "experimental_enable_dynamic_batch_size": True,
        "experimental_bucketizing_dynamic_shape": False,
        "experimental_xla_options": None,
    }
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field"):
        RunOptions().experimental_xla_options = 1


def test_input_context_divides_the_global_batch() -> None:
    context = InputContext(2, 1, 4)
    assert context.get_per_replica_batch_size(12) == 3
    assert (context.num_input_pipelines, context.input_pipeline_id) == (2, 1)
    assert context.num_replicas_in_sync == 4


@pytest.mark.parametrize(("size", "nearest"), [(13, "12 or 16"), (3, "4")])
def test_batch_that_does_not_divide_names_the_nearest(size, nearest) -> None:
    with pytest.raises(
        ValueError, match=rf"={size} is not a multiple of 4(?s:.)*use {nearest}, or"
    ):
        InputContext(num_replicas_in_sync=4).get_per_replica_batch_size(size)


def test_input_options_have_tensorflow_s_defaults_and_short_names() -> None:
    options = InputOptions()
    assert dataclasses.asdict(options) == {
        "experimental_fetch_to_device": True,
        "experimental_replication_mode": InputReplicationMode.PER_WORKER,
        "experimental_place_dataset_on_device": False,
        "experimental_per_replica_buffer_size": 1,
        "auto_shard_policy": AutoShardPolicy.AUTO,
        "input_workers": 0,
    }
    assert options.fetch_to_device
    assert options.replication_mode is InputReplicationMode.PER_WORKER
    assert not options.place_dataset_on_device
    assert options.per_replica_buffer_size == 1
    short = InputOptions(
        fetch_to_device=False,
        replication_mode=InputReplicationMode.PER_REPLICA,
        place_dataset_on_device=True,
        per_replica_buffer_size=0,
    )
    assert short == InputOptions(False, InputReplicationMode.PER_REPLICA, True, 0)
    assert short != options


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (
            {"prefetch": 2},
            TypeError,
            r"InputOptions received the unknown option prefetch=2.\nExpected names among",
        ),
        ({"replication_mode": "PER_REPLICA"}, TypeError, "experimental_replication_mode='PER_REPL"),
        ({"per_replica_buffer_size": 1.5}, TypeError, "_buffer_size=1.5 is not an int"),
        ({"per_replica_buffer_size": True}, TypeError, "_buffer_size=True is not an int"),
        ({"per_replica_buffer_size": -1}, ValueError, "_buffer_size=-1 is negative"),
        ({"auto_shard_policy": 2}, TypeError, "auto_shard_policy=2 is of type int"),
        ({"input_workers": -1}, ValueError, "input_workers=-1 is negative"),
        ({"input_workers": "2"}, TypeError, "input_workers='2' is not an int"),
        ({"place_dataset_on_device": True}, ValueError, "was given with experimental_fetch"),
    ],
)
def test_input_options_that_cannot_be_are_refused(wrong, error, message) -> None:
    with pytest.raises(error, match=message):
        InputOptions(**wrong)
