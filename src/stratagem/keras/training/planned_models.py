"""Models on planned (abstract) devices: their training steps, other forms of them, and meshes.

The model's variables move to a strategy of these devices, which stores only shapes, and back.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import keras

from stratagem.devices.finding import planned_default_strategy, planned_devices
from stratagem.errors import invalid
from stratagem.execution.tracing.functionalize import CapturedStep, capture
from stratagem.keras.numerics.rematerialization import remat
from stratagem.keras.patches import patches
from stratagem.keras.private import build_for, flatten_layers, jax_distribution, remat_mode
from stratagem.keras.variables.creation import Adoption, adopt
from stratagem.resources import changing
from stratagem.variables.registry import home_of

if TYPE_CHECKING:
    from stratagem.strategies.strategy import Strategy


def is_model(value: object) -> TypeGuard[keras.Model]:
    """Returns True if a value is a Keras model."""
    return isinstance(value, keras.Model)


def strategy_for_plan(model: keras.Model) -> Any:
    """Moves a model without a strategy to the planned devices; returns None without a plan."""
    strategy = planned_default_strategy()
    if strategy is not None:
        for variable in _variables(model):
            adopt(variable, strategy)
    return strategy


@contextlib.contextmanager
def training_step(
    model: keras.Model, batch: tuple[Any, ...], strategy: Strategy
) -> Generator[CapturedStep]:
    """Yields the training step of `fit` of a compiled model under another strategy.

    The model's variables belong to that strategy inside the block. Afterwards the model is built
    and otherwise unchanged. Raises ValueError if the model is not compiled, has no trainable
    variable, or uses parameter servers.
    """
    if getattr(model, "optimizer", None) is None:
        raise invalid(
            f"Model {model.name!r} is not compiled with an optimizer.",
            expected="a compiled model.",
            fix="call model.compile with an optimizer first.",
        )
    own: Strategy = cast("Any", model).distribute_strategy
    if own.executor.schedules:
        raise invalid(
            f"Model {model.name!r} belongs to {own}, which schedules steps on workers.",
            expected="a strategy whose replicas run in lockstep.",
            fix="create the model under MirroredStrategy to plan it.",
            code="SG801",
        )
    if own is not strategy:
        scope = contextlib.nullcontext() if own.topology.devices is None else own.scope()
        with scope:
            build_for(model, (*batch, None, None)[:3])
    with as_planned(_variables(model), strategy):
        yield _take_step(model, batch)


def _take_step(model: keras.Model, batch: tuple[Any, ...]) -> CapturedStep:
    if not model.trainable_variables:
        raise invalid(
            f"Model {model.name!r} has no trainable variable.",
            expected="a model with trainable variables.",
            fix="set trainable=True on some layers.",
        )
    with changing(model, train_function=None):
        step = capture(lambda: model.train_on_batch(*batch))
    assert step is not None
    return step


@contextlib.contextmanager
def as_planned(variables: Sequence[Any], strategy: Strategy) -> Generator[None]:
    """Moves variables to a strategy of abstract devices inside a `with` block."""
    adoptions: list[Adoption] = []
    try:
        for variable in variables:
            home = home_of(variable)
            if home is None or home.strategy is not strategy:
                adoptions.append(Adoption(variable, strategy))
        yield
    finally:
        for adoption in adoptions:
            adoption.undo()


def _variables(model: keras.Model) -> list[Any]:
    optimizer = getattr(model, "optimizer", None)
    found = [*model.variables, *model.metrics_variables]
    if optimizer is not None:
        found += optimizer.variables
    return list({id(variable): variable for variable in found}.values())


# Models that compute in another form while they are planned: recomputed, or in mixed precision.


def repeated_blocks(model: keras.Model) -> list[Any]:
    """Returns the blocks that `sg.remat` would recompute; none if the model recomputes already."""
    if any(remat_mode(layer) is not None for layer in flatten_layers(model)):
        return []
    try:
        return remat(model, None)
    except ValueError:
        return []


def is_float32(model: keras.Model) -> bool:
    """Returns True if all layers with weights compute in float32."""
    layers = [layer for layer in flatten_layers(model) if layer.weights]
    return all(layer.dtype_policy.name == "float32" for layer in layers)


@contextlib.contextmanager
def computing_as(
    model: keras.Model, policy: str | None, precision: str | None = None
) -> Generator[None]:
    """Recomputes blocks and sets the precision inside a `with` block; None leaves it as it is."""
    before = [(layer, layer.dtype_policy) for layer in flatten_layers(model)]
    if policy is not None:
        remat(model, policy)
    try:
        for layer, old in before:
            if precision is not None and old.name == "float32":
                layer.dtype_policy = precision
        yield
    finally:
        for layer, old in before:
            if precision is not None and old.name == "float32":
                layer.dtype_policy = old
        if policy is not None:
            remat(model, None)


# Meshes of `keras.distribution` on the devices of a plan, which do not exist.


@patches(
    jax_distribution,
    "list_devices",
    why="a planned script sees the devices that it is planned for, and makes meshes of them",
)
def listing_planned_devices(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps what `keras.distribution.list_devices` and `DeviceMesh` ask for devices."""

    @functools.wraps(original)
    def list_devices(device_type: str | None = None) -> Any:
        devices = planned_devices() or ()
        names = [
            str(device)
            for device in devices
            if device_type is None or device.platform == device_type.lower()
        ]
        return names or original(device_type)

    return list_devices
