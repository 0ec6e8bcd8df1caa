"""Which arguments are split, which are shared, and which are part of the program."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import stratagem as sg
from stratagem.execution.context.replica import ReplicaBatch
from stratagem.execution.tracing.arguments import Static, flatten_arguments


@pytest.fixture
def strategy():
    return sg.MirroredStrategy(["cpu:0", "cpu:1"])


def per_replica(strategy, *parts):
    return strategy.distribute_values_from_function(
        lambda context: jnp.asarray(parts[context.replica_id_in_sync_group])
    )


def flatten(*args, num_replicas=2, **kwargs):
    return flatten_arguments(args, kwargs, num_replicas=num_replicas)


def test_leaves_are_sorted_and_put_back_in_their_places(strategy) -> None:
    own = per_replica(strategy, [1.0, 2.0], [3.0, 4.0])
    mirrored = strategy.extended.broadcast_to(jnp.float32(5.0), None)
    marker = object()
    arguments = flatten(own, {"a": 1.5, "b": ["text", None]}, mirrored, key=marker, flag=True)
    assert [value is own.stacked for value in arguments.split] == [True]
    assert [float(value) for value in arguments.shared] == [1.5, 5.0]
    args, kwargs = arguments.rebuild(["split"], ["first", "second"])
    assert args == ("split", {"a": "first", "b": ["text", None]}, "second")
    assert kwargs == {"key": marker, "flag": True}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (1.0, 2.0),
        (1, 2),
        (np.float32(1), np.float32(2)),
        (np.ones(2), np.zeros(2)),
        (np.ones(2), np.ones(2, "float32")),  # as JAX has it, without 64 bits
        (jnp.ones(2), np.ones(2, "float32")),
        ("a", "a"),
        ([1.0, "a"], [5.0, "a"]),
        (True, True),
        (None, None),
    ],
)
def test_arguments_of_one_program(first, second) -> None:
    one, other = flatten(first), flatten(second)
    assert (one.structure, one.leaves) == (other.structure, other.leaves)
    assert hash(one.leaves) == hash(other.leaves)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (1, 1.0),
        (1, True),
        (1.0, np.float32(1.0)),  # a Python number lets the other operand decide the dtype
        (1.0, 1.0j),
        (np.ones(2), np.ones(3)),
        (np.ones(2, "float32"), np.ones(2, "int32")),
        ("a", "b"),
        (True, False),
        (None, "a"),
        ([1.0], (1.0,)),
        ({"a": 1.0}, {"b": 1.0}),
        (object(), object()),
        ("1", b"1"),
    ],
)
def test_arguments_of_different_programs(first, second) -> None:
    one, other = flatten(first), flatten(second)
    assert (one.structure, one.leaves) != (other.structure, other.leaves)


def test_split_and_shared_are_different_programs(strategy) -> None:
    own = per_replica(strategy, 1.0, 2.0)
    assert flatten(own).leaves != flatten(own.stacked).leaves


def test_objects_are_compared_by_identity_and_need_no_hash() -> None:
    class Mode:
        __hash__ = None  # type: ignore[assignment]

        def __eq__(self, other):
            raise AssertionError("compared by value")

    mode = Mode()
    assert Static(mode) == Static(mode)
    assert hash(Static(mode)) == hash(Static(mode))
    assert Static(mode) != Static(Mode())
    assert Static("a") == Static("a")
    assert Static(1) != Static(True)
    assert Static("a") != "a"


def test_true_sizes_are_part_of_the_program(strategy) -> None:
    full = per_replica(strategy, [1.0, 2.0], [3.0, 4.0])
    short = per_replica(strategy, [1.0, 2.0], [3.0])
    shorter = per_replica(strategy, [1.0, 2.0], np.zeros(0, "float32"))
    leaves = [flatten(value).leaves for value in (full, short, shorter)]
    assert len(set(leaves)) == 3
    assert [one[0].lengths for one in leaves] == [None, (2, 1), (2, 0)]


def test_the_batch_is_that_of_the_padded_argument_else_of_the_first_with_rows(strategy) -> None:
    scalar = per_replica(strategy, 1.0, 2.0)
    full = per_replica(strategy, np.ones((3, 2)), np.ones((3, 2)))
    short = per_replica(strategy, [1.0, 2.0], [3.0])
    assert flatten(full, short).batch == ReplicaBatch(size=2, lengths=(2, 1))
    assert flatten(scalar, np.ones(5), full).batch == ReplicaBatch(size=3)
    assert flatten(1.0, "text", np.ones(5), np.ones(7)).batch == ReplicaBatch(size=5)
    assert flatten(1.0, scalar, None).batch == ReplicaBatch()


def test_parts_that_one_program_cannot_take_are_refused(strategy) -> None:
    ranks = per_replica(strategy, [1.0], [[1.0]])
    with pytest.raises(
        ValueError, match=r"(?s)PerReplica with parts float32\[1\], float32\[1, 1\].*run_eagerly"
    ):
        flatten(ranks)
    with pytest.raises(ValueError, match="PerReplica with 2 replicas"):
        flatten(per_replica(strategy, 1.0, 2.0), num_replicas=3)
