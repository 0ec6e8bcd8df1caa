"""Pytrees are saved by path and restored with their types and shardings."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest

import stratagem as sg


class Moments(NamedTuple):
    mean: Any
    count: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
    params: Any
    moments: Moments
    note: str = dataclasses.field(default="", metadata={"static": True})


def state(fill: float = 0.0, *, key: int = 0) -> State:
    """Every container and every kind of leaf."""
    params = {
        "dense/a": {"w": jnp.full((2, 3), fill), "b": jnp.full((3,), fill, "bfloat16")},
        "list": [jnp.asarray(int(fill)), np.full(2, fill), (np.float32(fill), None)],
        "numbers": {"int": int(fill), "float": fill / 4, "bool": bool(fill), "complex": fill * 1j},
        "keys": (jax.random.key(key), jax.random.split(jax.random.key(key, impl="rbg"), 2)),
        "none": jnp.zeros((0, 4)),
        3: jnp.asarray([fill > 0]),
    }
    params = {str(name): value for name, value in params.items()}
    return State(params, Moments(jnp.full((2,), fill, "int8"), jnp.asarray(fill)), "static")


def as_plain(leaf: Any) -> Any:
    is_key = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


def assert_same(one: Any, two: Any) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(two)
    for ours, theirs in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        assert type(ours) is type(theirs)
        if isinstance(ours, jax.Array):
            assert (ours.dtype, ours.sharding, ours.committed) == (
                theirs.dtype,
                theirs.sharding,
                theirs.committed,
            )
        np.testing.assert_array_equal(as_plain(ours), as_plain(theirs))


@pytest.mark.slow
def test_restored_tree_is_the_attribute_and_has_the_types_of_the_old_one(tmp_path: Path) -> None:
    saved, other = state(5.0, key=1), state()
    path = sg.train.Checkpoint(state=saved, step=sg.Variable(3)).save(tmp_path / "ckpt")
    checkpoint = sg.train.Checkpoint(state=other, step=sg.Variable(0))
    checkpoint.restore(path).assert_consumed()
    assert_same(checkpoint.state, saved)
    assert_same(other, state())  # is not changed
    assert checkpoint.state.note == "static"
    checkpoint.state = state(6.0)
    path = checkpoint.save(tmp_path / "ckpt")
    again = sg.train.Checkpoint()
    again.restore(path).expect_partial()
    again.state = state()
    assert_same(again.state, state(6.0))


def test_shapes_and_dtypes_are_enough_to_restore(tmp_path: Path) -> None:
    tree = {"w": jnp.arange(6.0).reshape(2, 3), "key": jax.random.key(4)}
    path = sg.train.Checkpoint(tree).save(tmp_path / "ckpt")
    abstract = jax.eval_shape(lambda: jax.tree.map(lambda leaf: leaf, tree))
    checkpoint = sg.train.Checkpoint(abstract)
    with pytest.raises(ValueError, match=r"root\['key'\] is ShapeDtypeStruct.*no value to save"):
        checkpoint.save(tmp_path / "other")
    checkpoint.restore(path)
    assert_same(checkpoint.root, tree)


def test_optax_state_is_restored(tmp_path: Path) -> None:
    """Compared with the same updates without a checkpoint."""
    params = {"w": jnp.arange(3.0)}
    optimizer = optax.chain(optax.clip(1.0), optax.adam(0.1))

    def after(params: Any, opt_state: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            updates, opt_state = optimizer.update({"w": params["w"] - 1.0}, opt_state, params)
            return optax.apply_updates(params, updates), opt_state

    first = after(params, optimizer.init(params))
    path = sg.train.Checkpoint(train=first).save(tmp_path / "ckpt")
    checkpoint = sg.train.Checkpoint(train=(params, optimizer.init(params)))
    checkpoint.restore(path)
    assert_same(after(*checkpoint.train), after(*first))


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_arrays_of_a_strategy_keep_their_shardings(count: int, tmp_path: Path) -> None:
    strategy = sg.MirroredStrategy([f"cpu:{index}" for index in range(count)])

    def make(scale: float) -> dict[str, Any]:
        def own() -> Any:
            replica = sg.get_replica_context().replica_id_in_sync_group
            return (jnp.asarray(replica, "float32") + 1.0) * jnp.full((3,), scale)

        per_replica = strategy.run(own)
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:count]), ("x",))
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
        return {
            "parts": per_replica,
            "sum": strategy.extended.reduce_to("SUM", per_replica, per_replica),
            "sharded": jax.device_put(jnp.arange(4.0) * scale, sharding),
        }

    saved = make(2.0)
    path = sg.train.Checkpoint(tree=saved).save(tmp_path / "ckpt")
    checkpoint = sg.train.Checkpoint(tree=make(0.0))
    checkpoint.restore(path).assert_consumed()
    restored = checkpoint.tree
    assert_same(restored, saved)
    parts = [np.asarray(part).tolist() for part in strategy.local_results(restored["parts"])]
    assert parts == [[2.0 * (index + 1)] * 3 for index in range(count)]
    np.testing.assert_array_equal(restored["sharded"], [0.0, 2.0, 4.0, 6.0])
    doubled = strategy.run(lambda part: part * 2.0, args=(restored["parts"],))
    assert np.asarray(strategy.local_results(doubled)[0]).tolist() == [4.0] * 3
    three = sg.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"])
    other = saved | {"parts": three.run(lambda: jnp.zeros(3))}
    words = {
        1: "Not in the checkpoint: parts/0. Only there: parts",  # one replica's is a plain array
        2: r"tree\['parts'\].* is float32\[3, 3\] here, NamedSharding.* but float32\[2, 3\]",
    }
    with pytest.raises(ValueError, match=words[count]):
        sg.train.Checkpoint(tree=other).restore(path)


@pytest.mark.slow
def test_other_shapes_and_dtypes_name_the_path_and_both_shardings(tmp_path: Path) -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",))
    sharded = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    tree = {
        "a": [jax.device_put(jnp.zeros(4), sharded)],
        "b": np.zeros(2, "int32"),
        "k": jax.random.key(0),
    }
    path = sg.train.Checkpoint(state=tree).save(tmp_path / "ckpt")
    rbg = jax.random.key(0, impl="rbg")
    for other, words in (
        (
            tree | {"a": [jnp.zeros(3)]},
            r"state\['a'\]\[0\] is float32\[3\] here, SingleDeviceSharding.* but "
            r"float32\[4\] in .*ckpt-1, NamedSharding\(.*'x'",
        ),
        (
            tree | {"b": np.zeros(2)},
            r"state\['b'\] is float64\[2\] here, on the host, but int32\[2\] in",
        ),
        (tree | {"k": rbg}, r"state\['k'\] is key<rbg>\[\] here, .*, but key<fry>\[\] in"),
        ({"a": tree["a"], "b": tree["b"], "c": rbg}, "Not in the checkpoint: c. Only there: k"),
        (tree | {"c": 1}, "Not in the checkpoint: c. Only there: none"),
    ):
        checkpoint = sg.train.Checkpoint(state=other)
        with pytest.raises(ValueError, match=words):
            checkpoint.restore(path)
        assert checkpoint.state is other
    with pytest.raises(ValueError, match="pytree like the saved one and convert it"):
        sg.train.Checkpoint(state=tree | {"b": np.zeros(3, "int32")}).restore(path)


def test_other_pytrees_are_rejected() -> None:
    @dataclasses.dataclass
    class Unregistered:
        w: Any

    layer = keras.layers.Dense(1)
    for tree, words in (
        ({"a": ("text",)}, r"state\['a'\]\[0\]='text' cannot be saved"),
        ({"a": Unregistered(jnp.zeros(2))}, r"state\['a'\]=.*Unregistered"),
        ([layer, jnp.zeros(2)], r"state\[0\]=<Dense"),
        ({"a": 2**80}, r"state\['a'\]=1208925819614629174706176"),
    ):
        with pytest.raises(TypeError, match=words) as caught:
            sg.train.Checkpoint(state=tree)
        assert re.search(r"Fix: .*register_dataclass", str(caught.value))
    with pytest.raises(TypeError, match=r"store numbers in a keras\.Variable"):
        sg.train.Checkpoint(step=3)


def test_memory_keeps_pytrees_too(tmp_path: Path) -> None:
    checkpoint = sg.train.Checkpoint(state=state(5.0, key=1))
    sg.checkpoint.MemoryBackup(checkpoint, tmp_path).save(1)
    checkpoint.state = state()
    assert sg.checkpoint.MemoryBackup(checkpoint, tmp_path).restore() == 1
    assert_same(checkpoint.state, state(5.0, key=1))
