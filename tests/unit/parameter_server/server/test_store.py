"""What one server does with its variables."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
import pytest

from stratagem.parameter_server.server.shards import ShardSpec, State
from stratagem.parameter_server.server.store import ServerVariables
from tests.unit.parameter_server.server.update_rules import Momentum


def make_store(**arrays: np.ndarray) -> ServerVariables:
    """A store with these variables; those whose name begins with `table` are updated by rows."""
    store = ServerVariables()
    for name, value in arrays.items():
        spec = ShardSpec(name, value.shape, value.dtype.name, has_rows=name.startswith("table"))
        assert store.create(spec, lambda value=value: value)
    return store


def floats(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


@pytest.mark.parametrize(
    "other",
    [
        ShardSpec("v", (4,), "float32"),
        ShardSpec("v", (3,), "int32"),
        ShardSpec("v", (3,), "float32", first_row=1),
        ShardSpec("v", (3,), "float32", has_rows=True),
    ],
)
def test_other_variable_of_that_name_is_refused(other) -> None:
    store = make_store(v=floats(3))
    with pytest.raises(ValueError, match="Variable 'v' was created as ShardSpec"):
        store.create(other, lambda: np.zeros(other.shape))


def test_initial_value_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"The initial value of 'v' has shape \(2,\)"):
        ServerVariables().create(ShardSpec("v", (3,), "float32"), lambda: np.zeros(2))


@pytest.mark.parametrize("name", ["v", "table"])
def test_whole_variables_are_read_and_assigned(name) -> None:
    store = make_store(**{name: floats(4, 2)})
    (before,) = store.pull([name])
    store.assign(name, np.ones((4, 2)), sign=1)
    store.assign(name, np.full((4, 2), 3.0), sign=-1)
    np.testing.assert_array_equal(store.pull([name])[0], floats(4, 2) - 2)
    store.assign(name, np.zeros((4, 2)))
    np.testing.assert_array_equal(store.pull([name])[0], 0)
    np.testing.assert_array_equal(before, floats(4, 2))  # what was read stays as it was
    assert store.pull([name])[0].dtype == np.float32
    with pytest.raises(ValueError, match=r"was assigned a value of shape \(2,\)"):
        store.assign(name, np.zeros(2))


class InJax(Momentum):
    """Its values are arrays of JAX, as those of Keras's optimizers are."""

    def apply(self, state: State, grads: Mapping[str, np.ndarray]) -> State:
        made = super().apply(state, grads)
        return dataclasses.replace(
            made, values={name: jnp.asarray(value) for name, value in made.values.items()}
        )


def test_rows_are_read_after_an_update_by_jax() -> None:
    store = make_store(v=floats(4, 2))
    store.set_rule(InJax(), ["v"])
    store.update({"v": np.ones((4, 2), np.float32)}, {})
    rows = store.pull_rows("v", np.array([3, 0]))
    assert isinstance(rows, np.ndarray)
    np.testing.assert_allclose(rows, floats(4, 2)[[3, 0]] - 0.1, rtol=1e-6)


def test_other_optimizer_is_refused_and_the_same_keeps_its_slots() -> None:
    store = make_store(v=floats(3))
    store.set_rule(Momentum(), ["v"])
    store.update({"v": np.ones(3, np.float32)}, {})
    store.set_rule(Momentum(), ["v"])
    np.testing.assert_array_equal(store.pull(["v:v"])[0], 1)
    assert store.scalars == {"count": 1}
    with pytest.raises(ValueError, match=r"with {'name': 'other'}: the servers already have"):
        store.set_rule(Momentum("other"), ["v"])
    assert store.optimizers == {"": {"name": "momentum"}}
    store.set_rule(InJax(), ["v"])  # described alike: the newest one updates
    store.update({"v": np.ones(3, np.float32)}, {})
    assert not isinstance(store._shards["v"].value, np.ndarray)


def test_optimizers_have_their_own_variables_slots_and_scalars() -> None:
    store = make_store(v=floats(3), w=floats(3), table=floats(4, 2))
    store.set_rule(Momentum(), ["v", "table"], "first")
    store.set_rule(Momentum("other"), ["w", "v"], "second")
    one, row = np.ones(3, np.float32), (np.array([1]), np.ones((1, 2), np.float32))
    # An update may be of several, and counts once.
    assert (
        store.update(
            {"v": one, "w": one}, {"table": row}, {"v": "first", "w": "second", "table": "first"}
        )
        == 1
    )
    assert store.update({"v": one}, {}, {"v": "second"}) == 2
    assert store.scalars == {"first.count": 1, "second.count": 2}
    v, w, table, *slots = store.pull(["v", "w", "table", "v:first.v", "v:second.v", "w:second.v"])
    np.testing.assert_allclose(v, floats(3) - 0.1 - 0.1, rtol=1e-6)
    np.testing.assert_allclose(w, floats(3) - 0.1, rtol=1e-6)
    np.testing.assert_allclose(
        table, floats(4, 2) - [[0, 0], [0.1, 0.1], [0, 0], [0, 0]], rtol=1e-6
    )
    np.testing.assert_array_equal(slots, np.ones((3, 3)))
    store.set_scalars({"second.count": 7.0})
    assert store.scalars == {"first.count": 1, "second.count": 7}
    assert store.scalars["second.count"].dtype == np.int64
    for name in ("count", "third.count", "first.other"):
        with pytest.raises(KeyError, match=f"no scalar '{name}' on this server"):
            store.set_scalars({name: 7})
    with pytest.raises(RuntimeError, match=r"gradients of \['v'\] came before"):
        store.update({"v": one}, {})


@pytest.mark.parametrize("name", ["w", "v:x", "w:v"])
def test_unknown_names_are_reported(name) -> None:
    store = make_store(v=floats(3))
    store.set_rule(Momentum(), ["v"])
    with pytest.raises(KeyError, match=f"no variable '{name}' on this server"):
        store.pull([name])


def test_readers_see_whole_updates_only() -> None:
    """Two variables that are always equal, while one thread updates and others read."""
    store = make_store(a=np.zeros(1000, np.float32), b=np.zeros(1000, np.float32))
    store.set_rule(Momentum(), ["a", "b"])
    is_over, torn = threading.Event(), []

    def read() -> None:
        while not is_over.is_set():
            a, b = store.pull(["a", "b"])
            if not np.array_equal(a, b):
                torn.append((a, b))

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    gradient = np.ones(1000, np.float32)
    for _ in range(200):
        store.update({"a": gradient, "b": gradient}, {})
    is_over.set()
    for thread in threads:
        thread.join()
    assert torn == []
    assert store.version == 200
