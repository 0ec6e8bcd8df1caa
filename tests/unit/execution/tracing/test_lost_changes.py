"""Objects that a step changes: an error where the change would be lost."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import stratagem as sg
from stratagem import config


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Module:
    """A mutable pytree, as modules of Flax NNX are."""

    kernel: Any
    count: Any


@pytest.fixture(params=[("run", 1), ("run", 2), ("eager", 1), ("eager", 2), ("function", 1)])
def call(request: pytest.FixtureRequest) -> Any:
    way, count = request.param
    strategy = sg.MirroredStrategy([f"cpu:{index}" for index in range(count)])
    config.run_eagerly(way == "eager")
    if way == "function":
        yield lambda fn, *args: sg.function(fn)(*args)
    else:
        yield lambda fn, *args: strategy.local_results(strategy.run(fn, args=args))[0]
    config.run_eagerly(False)


def _module() -> Module:
    return Module(jnp.ones(3), jnp.zeros((), jnp.int32))


def _train(module: Module) -> Any:
    module.kernel = module.kernel * 2
    module.count += 1
    return module.kernel.sum()


def test_changed_argument_is_an_error(call) -> None:
    module = _module()
    with pytest.raises(RuntimeError, match="_train changed its argument of type Module") as caught:
        call(_train, module)
    assert "nnx.merge(graph, state)" in str(caught.value)
    assert module.kernel.tolist() == [1, 1, 1]


def test_change_deep_in_an_argument_is_an_error(call) -> None:
    with pytest.raises(RuntimeError, match="would be lost"):
        call(lambda tree: _train(tree["modules"][0]), {"modules": [_module()]})


def test_part_of_a_change_that_is_returned_is_an_error(call) -> None:
    def step(module: Module) -> Any:
        _train(module)
        return module.kernel

    with pytest.raises(RuntimeError, match="would be lost"):
        call(step, _module())


def test_changed_argument_that_is_returned_is_none(call) -> None:
    def step(module: Module) -> Any:
        _train(module)
        return module

    changed = step(_module())
    result = jax.tree.leaves(call(step, _module()))
    first = [getattr(leaf, "components", (leaf,))[0] for leaf in result]
    assert first[0].reshape(-1)[:3].tolist() == changed.kernel.tolist()


def test_state_in_state_out_is_the_loop_by_hand(call) -> None:
    def step(state: dict[str, Any]) -> Any:
        module = Module(**state)
        _train(module)
        return module.kernel

    assert call(step, dataclasses.asdict(_module())).tolist() == [2, 2, 2]


@pytest.mark.slow
def test_lists_and_dicts_of_a_step_are_its_own(call) -> None:
    def step(state: dict[str, Any]) -> Any:
        state["kernel"] = 2 * state["kernel"]
        return state["kernel"].sum()

    assert float(call(step, {"kernel": jnp.ones(3)})) == 6


def test_error_of_flax_for_a_module_around_the_step_names_the_way() -> None:
    def step() -> None:
        raise ValueError("Cannot extract graph node from different trace level, got Param(...)")

    with pytest.raises(RuntimeError, match="step changed a Flax NNX object created outside it"):
        sg.OneDeviceStrategy("cpu:0").run(step)


def test_modules_of_flax_are_refused_or_trained_by_their_state() -> None:
    nnx = pytest.importorskip("flax.nnx", reason="Flax is no dependency of this library")
    optax = pytest.importorskip("optax")
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    x = jnp.ones((4, 3))

    def train(model: Any, optimizer: Any, x: Any) -> Any:
        loss, gradients = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
        context = sg.get_replica_context()
        gradients = context.all_reduce("MEAN", gradients) if context else gradients
        optimizer.update(model, gradients)
        return loss

    with pytest.raises(RuntimeError, match="would be lost"):
        strategy.run(train, args=(model, optimizer, x))
    with pytest.raises(RuntimeError, match="object created outside it"):
        strategy.run(lambda x: train(model, optimizer, x), args=(x,))

    graph, state = nnx.split((model, optimizer))

    def step(state: Any, x: Any) -> Any:
        modules = nnx.merge(graph, state)
        return train(*modules, x), nnx.state(modules)

    for _ in range(3):
        _, state = strategy.run(step, args=(state, x))

    def forget(state: Any, *, copy: bool) -> None:
        model, _ = nnx.merge(graph, state, copy=copy)
        model.kernel[...] = jnp.zeros_like(model.kernel[...])

    with pytest.raises(RuntimeError, match=r"To drop a change .* copy=True"):
        strategy.run(forget, args=(state,), kwargs={"copy": False})
    strategy.run(forget, args=(state,), kwargs={"copy": True})
    plain_model, plain_optimizer = nnx.merge(*nnx.split((model, optimizer)))
    for _ in range(3):
        train(plain_model, plain_optimizer, x)
    nnx.update((model, optimizer), strategy.reduce("MEAN", state, axis=None))
    assert jnp.allclose(model.kernel[...], plain_model.kernel[...], atol=1e-6)
