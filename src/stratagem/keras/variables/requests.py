"""Properties of a variable that is about to be created."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Generator, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol

import jax
import jax.numpy as jnp
import keras
from jax.core import Tracer

from stratagem.contexts import explicit_device, naming_device
from stratagem.devices.finding import find_devices
from stratagem.devices.shards import creating_on_host
from stratagem.errors import invalid
from stratagem.keras.patches import patches
from stratagem.resources import setting
from stratagem.variables.placement import sole_device
from stratagem.variables.registry import Home, VariableKind

if TYPE_CHECKING:
    from jax.typing import DTypeLike

# Attribute of the variables of seed generators.
IS_SEED = "_stratagem_is_seed"


@dataclasses.dataclass(frozen=True)
class Annotations:
    """Properties of new variables that the calling code sets for a `with` block."""

    kind: tuple[str, str] | None = None  # synchronization and aggregation, in Keras's strings
    is_table: bool = False  # True for a table whose rows are looked up
    keyed_table: Any = None  # `KeyedTableOptions` of a table with rows by key on servers
    slot_of: Any = None  # the variable that an optimizer's slot belongs to
    is_of_metric: bool = False
    is_worker_local: bool = False  # stays in each process, as seeds do


_NONE = Annotations()
_annotations: ContextVar[Annotations] = ContextVar("annotations")


def current_annotations() -> Annotations:
    """Returns the annotations of a variable that is created now."""
    return _annotations.get(_NONE)


def annotated(**changes: Any) -> contextlib.AbstractContextManager[Annotations]:
    """Changes the annotations of variables that are created in a `with` block."""
    return setting(_annotations, dataclasses.replace(current_annotations(), **changes))


# Sources of variables for functions that are called again: each call reuses the first's.
#
# While a source is set, `keras.Variable(...)` in a scope asks it before it creates a variable.


@dataclasses.dataclass(frozen=True, kw_only=True)
class VariableRequest:
    """Description of a variable before it is created.

    Args:
        path: its future path.
        name: the last part of the path.
        shape: its shape.
        dtype: its dtype.
        trainable: initial value of `trainable`; its layer may change it later.
        is_slot: True for an optimizer's slot of a variable.
        has_components: True for one component per replica.
        is_summed: True for a metric's variable, whose components are summed on read.
    """

    path: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    is_slot: bool
    has_components: bool
    is_summed: bool

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)


class VariableSource(Protocol):
    """Decides if a requested variable exists already."""

    def existing(self, request: VariableRequest) -> keras.Variable | None:
        """Returns the existing variable for a request; None to create one."""
        ...

    def add(self, request: VariableRequest, variable: keras.Variable) -> None:
        """Takes a new variable, which has no attributes yet."""
        ...


_IS_AGAIN = "_stratagem_is_created_again"

# Replicas that run eagerly each have a thread, which starts with a copy of these.
_source: ContextVar[VariableSource | None] = ContextVar("variable_source", default=None)


def current_source() -> VariableSource | None:
    """Returns the current source of variables; None outside every `variables_from`."""
    return _source.get()


def variables_from(source: VariableSource | None) -> contextlib.AbstractContextManager[object]:
    """Uses a source for variables created in a `with` block; None creates them all."""
    return setting(_source, source)


def as_created(variable: keras.Variable, request: VariableRequest) -> Any:
    """Prepares an existing variable to be returned by `__new__`.

    Python calls `__init__` on it again; `is_initialized` makes that one call do nothing.
    """
    variable.trainable = request.trainable  # Another call may have frozen the layer.
    object.__setattr__(variable, _IS_AGAIN, True)
    return variable


def is_initialized(variable: object) -> bool:
    """Returns True in the `__init__` that follows `as_created`."""
    return vars(variable).pop(_IS_AGAIN, False)


# Variables that a user puts on a device by name, in a block of `keras.device`.
#
# Without this, a strategy that keeps a variable on all its devices would ignore the block.


@patches(
    keras,
    "device",
    why="a variable created in keras.device is stored there, or an error says why not",
)
def noted_device(original: Callable[..., Any]) -> Any:
    """Returns `keras.device` that records the device it names."""

    @contextlib.contextmanager
    def device(device_name: str) -> Generator[Any]:
        with original(device_name) as entered, naming_device(device_name):
            yield entered

    device.__doc__ = original.__doc__
    return device


def check_explicit_device(path: str, home: Home) -> None:
    """Raises where a new variable of a strategy is to be on a device that it cannot be kept on.

    Args:
        path: of the variable.
        home: the strategy and the kind of the variable.

    Raises:
        ValueError: a block of `keras.device` names another device than the strategy's only one.
    """
    name = explicit_device()
    if name is None:
        return
    strategy = home.strategy
    is_shared = home.kind is not VariableKind.ON_READ
    if is_shared and strategy.placement.allows_devices:
        return
    named = tuple(find_devices([name]))
    if named in (tuple(strategy.topology.all_devices or ()), (sole_device(strategy.placement),)):
        return
    raise invalid(
        f"Variable {path!r} was created in keras.device({name!r}), in the scope of {strategy}.",
        expected="no device for a single variable: the strategy places its variables. A "
        "HybridStrategy accepts one, except for ON_READ variables.",
        fix="remove keras.device, or use sg.HybridStrategy.",
        code="SG208",
    )


# Initial values of variables, known outside every trace.


def as_initializer(value: object, dtype: DTypeLike | None) -> tuple[Any, Any, Any]:
    """Turns an initial value into what Keras can also call later, outside a trace.

    Args:
        value: array, number or variable.
        dtype: dtype; None for that of the value.

    Returns:
        The initializer, the shape and the dtype.

    Raises:
        ValueError: a traced value.
    """
    if isinstance(value, keras.Variable):
        value = value.value
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(value)):
        raise invalid(
            "A variable was given an initial value that a compiled function computes.",
            expected="a value that is known when the variable is created, or an initializer.",
            fix="create the variable with an initializer, and assign the value.",
        )
    # Not as a part of the program that is being traced, nor where it may be too large for a device.
    with jax.ensure_compile_time_eval(), creating_on_host(not isinstance(value, jax.Array)):
        array = jnp.asarray(keras.ops.convert_to_tensor(value, dtype=dtype))
        is_given = array is value

    def initializer(shape: Sequence[int], dtype: DTypeLike | None = None) -> Any:
        # A copy of what the caller has, too: a step donates the buffers of its variables.
        own = jnp.array(array, copy=True) if is_given else array
        # The dtype of a variable is its own: a number's would give way to other operands'.
        return jax.lax.convert_element_type(own, dtype or array.dtype)

    return initializer, array.shape, keras.backend.standardize_dtype(array.dtype)


def draws_same_again(initializer: object) -> bool:
    """Returns True for an initializer of Keras with a seed of its own."""
    kind = type(initializer)
    is_of_keras = getattr(keras.initializers, kind.__name__, None) is kind
    return is_of_keras and isinstance(getattr(initializer, "seed", None), int)
