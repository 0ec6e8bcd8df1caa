"""Keras optimizers as update rules of parameter servers."""

from __future__ import annotations

import inspect
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import keras
import numpy as np

from stratagem import contexts as stack
from stratagem.errors import explain
from stratagem.keras.private import KerasSaveable, config_and_rate
from stratagem.parameter_server.server.shards import Slot, State

# These update each element on its own, so that an array may be updated apart from the others, with
# the same result, bit for bit. Others, such as Lamb, compute norms, and a user's may do anything.
_ELEMENTWISE = frozenset(
    {
        keras.optimizers.Adadelta,
        keras.optimizers.Adagrad,
        keras.optimizers.Adam,
        keras.optimizers.Adamax,
        keras.optimizers.AdamW,
        keras.optimizers.Ftrl,
        keras.optimizers.Lion,
        keras.optimizers.Nadam,
        keras.optimizers.RMSprop,
        keras.optimizers.SGD,
    }
)
# A push has rows of each table, padded to one of a few sizes. One program for all would be one of
# very many: 26 tables that each waver between two sizes have 2**26, of 1 to 1.7 s each.
_ROWS = "stratagem_rows"


# What a script may set after an import, on which results depend.
_SETTINGS_OF_JAX = (
    "jax_debug_infs",
    "jax_debug_nans",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_enable_x64",
    "jax_numpy_dtype_promotion",
    "jax_numpy_rank_promotion",
    "jax_threefry_partitionable",
)


class ProcessSettings:
    """Settings of Keras and JAX in the process that makes it, which another process takes over."""

    def __init__(self) -> None:
        config = keras.config
        self._pid = os.getpid()
        self._of_keras = {
            config.set_floatx: config.floatx(),
            config.set_epsilon: config.epsilon(),
            config.set_image_data_format: config.image_data_format(),
            config.set_dtype_policy: config.dtype_policy(),
        }
        self._of_jax = {name: getattr(jax.config, name) for name in _SETTINGS_OF_JAX}

    def take_over(self) -> None:
        """Sets them in this process, unless it is the one that they are from."""
        if self._pid == os.getpid():
            return
        for set_value, value in self._of_keras.items():
            set_value(value)
        for name, value in self._of_jax.items():
            if getattr(jax.config, name) != value:
                jax.config.update(name, value)


# Suffix of a shard's name.
_SHARD = re.compile(r"/part_\d+$")

_Shapes = tuple[tuple[str, tuple[int, ...], np.dtype[Any]], ...]
# By place of the variable and name.
_Slots = dict[tuple[int, str], Any]


class KerasUpdate:
    """Applies gradients with a Keras optimizer; each server has its own.

    Clipping needs the gradients of all servers, so gradients are clipped and unscaled before they
    are sent. Accumulated gradients are clipped as a mean; by norm, this raises a
    NotImplementedError.

    The optimizer's own variables are not changed. `undecayed` are names of variables excluded from
    weight decay, and `constraints` those of variables by name. `start` are initial scalars that
    differ from the defaults. With `is_told_scalars`, they arrive with each push, so that another
    learning rate is the same rule.
    """

    def __init__(
        self,
        optimizer: keras.optimizers.Optimizer,
        undecayed: Sequence[str] = (),
        start: Mapping[str, np.ndarray] | None = None,
        *,
        is_told_scalars: bool = False,
        constraints: Mapping[str, Any] | None = None,
    ) -> None:
        self._constraints = dict(constraints or {})
        self._class = type(optimizer)
        self._undecayed = sorted(undecayed)
        self._start = dict(start or {})
        self._is_told_scalars = is_told_scalars
        done_before = {"clipnorm": None, "global_clipnorm": None, "loss_scale_factor": None}
        if not optimizer.gradient_accumulation_steps:
            done_before["clipvalue"] = None
        elif optimizer.clipnorm is not None or optimizer.global_clipnorm is not None:
            raise NotImplementedError(
                explain(
                    f"{optimizer.name} accumulates gradients and clips their norm.",
                    expected="only one of the two under a ParameterServerStrategy: each server "
                    "has only a part of the mean gradient.",
                    fix="clip by value with clipvalue, or omit gradient_accumulation_steps.",
                    code="SG609",
                )
            )
        config, self._rate = config_and_rate(optimizer)
        self._config = {**config, **done_before}
        self._custom_objects = _custom_objects(self._config)
        self._attributes = _own_attributes(optimizer)
        if self._attributes:  # an error of its class is raised here, not by a server
            self._made()
        self._programs: dict[_Shapes, _Program] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_programs": {}, "_settings": ProcessSettings()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        state.pop("_settings").take_over()
        vars(self).update(state)

    def describe(self) -> dict[str, Any]:
        """Returns the name and the hyperparameters of the optimizer."""
        undecayed = {"undecayed": self._undecayed} if self._undecayed else {}
        # Keras numbers names per process, so equal optimizers have different ones.
        left_out = {"name", *(self._start if self._is_told_scalars else ())}
        described = {**self._config, **_plain(self._attributes)}
        if self._rate is not None:
            described["learning_rate"] = _described(self._rate)
        numbers = {key: value for key, value in described.items() if key not in left_out}
        constraints = {
            name: f"{type(one).__name__}({one.get_config() if hasattr(one, 'get_config') else ''})"
            for name, one in sorted(self._constraints.items())
        }
        constrained = {"constraints": constraints} if constraints else {}
        return {"optimizer": self._class.__name__, **numbers, **undecayed, **constrained}

    def scalars(self) -> dict[str, np.ndarray]:
        """Returns the initial scalars of the optimizer."""
        return {**self._program((("v", (1,), np.dtype("float32")),)).scalars, **self._start}

    def slots(self, name: str, shape: tuple[int, ...], dtype: str) -> list[Slot]:
        """Returns the slots of a variable."""
        # Built for one row: memory may not suffice for a second copy.
        one_row = (1, *shape[1:]) if shape else shape
        program = self._program(((name, one_row, np.dtype(dtype)),))
        return [
            Slot(slot, str(variable.dtype), _initial(variable, self._class, slot))
            for (_, slot), variable in program.slots.items()
        ]

    def apply(self, state: State, grads: Mapping[str, np.ndarray]) -> State:
        """Returns the state after one update.

        Rows of tables are updated one table after the other, by programs that tables share.
        """
        rows = state.rows if self._class in _ELEMENTWISE else ()
        whole = [name for name in state.values if name not in rows]
        made = [self._applied(state, grads, whole, whole)] if whole else []
        for name in rows:
            label = name if _is_named(name, self._undecayed) else _ROWS
            made.append(self._applied(state, grads, [name], [label]))
        values: dict[str, Any] = {}
        slots: dict[str, Any] = {}
        for one in made:
            values.update(one.values)
            slots.update(one.slots)
        # JAX may compute in the background: gradients may be overwritten after this.
        jax.block_until_ready(values)
        return State(made[0].scalars, values, slots)  # each of them has counted the update

    def _applied(
        self,
        state: State,
        grads: Mapping[str, np.ndarray],
        names: Sequence[str],
        labels: Sequence[str],
    ) -> State:
        values = [state.values[name] for name in names]
        shapes = tuple(
            (label, value.shape, value.dtype) for label, value in zip(labels, values, strict=True)
        )
        return self._program(shapes).apply(state, grads, names)

    def _program(self, shapes: _Shapes) -> _Program:
        program = self._programs.get(shapes)
        if program is None:
            with stack.push_default():  # a worker is in the scope of its strategy
                program = _Program(self._made(), shapes, self._undecayed, self._constraints)
            self._programs[shapes] = program
        return program

    def _made(self) -> Any:
        """Returns a new optimizer like the one that was given.

        Raises a NotImplementedError if its class cannot make one.
        """
        config = dict(self._config)
        if self._rate is not None:
            config["learning_rate"] = self._rate
        with stack.push_default(), keras.saving.custom_object_scope(self._custom_objects):
            try:
                made = self._class.from_config(config)
            except TypeError as error:
                made = self._made_of_arguments(config, error)
        for name, value in self._attributes.items():
            setattr(made, name, value)
        return made

    def _made_of_arguments(self, config: Mapping[str, Any], error: TypeError) -> Any:
        """Makes an optimizer of a class that has arguments of its own, but no `get_config`."""
        known = {**config, **self._attributes}
        arguments = inspect.signature(self._class).parameters.values()
        lacking = [
            one.name
            for one in arguments
            if one.name not in known
            and one.default is one.empty
            and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
        ]
        if lacking:
            raise NotImplementedError(
                explain(
                    f"Servers cannot make a {self._class.__name__}: {error}",
                    expected=f"a get_config that returns the arguments {lacking} too.",
                    fix="override get_config in the class, or store each argument in an attribute "
                    "of its name.",
                    code="SG609",
                )
            ) from error
        return self._class(**{one.name: known[one.name] for one in arguments if one.name in known})


class _Program:
    """Compiled update of variables of certain shapes."""

    def __init__(
        self,
        optimizer: keras.optimizers.Optimizer,
        shapes: _Shapes,
        undecayed: Sequence[str],
        constraints: Mapping[str, Any],
    ) -> None:
        labels = [label for label, _, _ in shapes]
        self._optimizer = optimizer
        references = [_variable(*shape) for shape in shapes]
        for label, reference in zip(labels, references, strict=True):
            reference.constraint = constraints.get(label)
        if undecayed:
            optimizer.exclude_from_weight_decay(
                [
                    one
                    for label, one in zip(labels, references, strict=True)
                    if _is_named(label, undecayed)
                ]
            )
        places = {id(variable): place for place, variable in enumerate(references)}
        self.slots: _Slots = {}
        counted: Counter[tuple[int, str]] = Counter()
        original: Callable[..., Any] = optimizer.add_variable_from_reference

        def note(
            reference_variable: keras.Variable,
            name: str | None = None,
            *args: object,
            **kwargs: object,
        ) -> Any:
            variable = original(reference_variable, name, *args, **kwargs)
            owner = places[id(reference_variable)]
            counted[owner, str(name)] += 1
            number = counted[owner, str(name)]
            slot = str(name) if number == 1 else f"{name}_{number}"
            self.slots[owner, slot] = variable
            return variable

        optimizer.add_variable_from_reference = note
        optimizer.build(references)
        del optimizer.add_variable_from_reference
        of_slot = {id(variable): key for key, variable in self.slots.items()}
        # The optimizer's variables in order: a slot or a scalar.
        self._order: list[str | tuple[int, str]] = []
        self.scalars: dict[str, np.ndarray] = {}
        scalars = [one for one in optimizer.variables if id(one) not in of_slot]
        names = iter(scalar_names(scalars))
        for variable in optimizer.variables:
            key = of_slot.get(id(variable))
            if key is None:
                key = next(names)
                self.scalars[key] = np.asarray(variable.value)
            self._order.append(key)
        self._check_scalars(type(optimizer))
        self._run = jax.jit(self._step)

    def apply(self, state: State, grads: Mapping[str, np.ndarray], names: Sequence[str]) -> State:
        """Returns the new state of variables, in the order of the shapes."""
        results: tuple[dict[str, Any], list[Any], _Slots] = self._run(
            dict(state.scalars),
            [state.values[name] for name in names],
            {(place, slot): state.slots[names[place]][slot] for place, slot in self.slots},
            [grads[name] for name in names],
        )
        scalars, values, slots = results
        by_name: dict[str, dict[str, Any]] = {name: {} for name in names}
        for (place, slot), value in slots.items():
            by_name[names[place]][slot] = value
        return State(scalars, dict(zip(names, values, strict=True)), by_name)

    def _step(
        self, scalars: dict[str, Any], values: list[Any], slots: _Slots, grads: list[Any]
    ) -> tuple[dict[str, Any], list[Any], _Slots]:
        # No output may alias a gradient, whose memory the worker reuses.
        grads = jax.lax.optimization_barrier(grads)
        state = [scalars[key] if isinstance(key, str) else slots[key] for key in self._order]
        new_values, new_state = self._optimizer.stateless_apply(state, grads, values)
        pairs = list(zip(self._order, new_state, strict=True))
        return (
            {key: value for key, value in pairs if isinstance(key, str)},
            new_values,
            {key: value for key, value in pairs if not isinstance(key, str)},
        )

    def _check_scalars(self, kind: type) -> None:
        num_others = sum(isinstance(key, str) for key in self._order)
        sized = [name for name, value in self.scalars.items() if value.ndim]
        if sized or len(self.scalars) != num_others:
            raise other_shapes(kind, sized or list(self.scalars))


def _own_attributes(optimizer: keras.optimizers.Optimizer) -> dict[str, Any]:
    """Returns what the user's class of an optimizer has set, apart from its variables.

    Without a `get_config` of its own, a new optimizer would have the defaults instead.
    """
    if type(optimizer).__module__.partition(".")[0] == "keras":
        return {}
    with stack.push_default():
        of_keras = vars(keras.optimizers.Optimizer(0.0))
    return {
        name: _untracked(value)
        for name, value in vars(optimizer).items()
        if name not in of_keras
        and not name.startswith("_stratagem")
        and not any(
            isinstance(one, keras.Variable | KerasSaveable) for one in keras.tree.flatten(value)
        )
    }


def _untracked(value: Any) -> Any:
    """Returns a container without Keras's tracker, which refers to the variables."""
    if isinstance(value, list):
        return [_untracked(one) for one in value]
    if isinstance(value, dict):
        return {key: _untracked(one) for key, one in value.items()}
    return set(value) if isinstance(value, set) else value


def _custom_objects(config: object) -> dict[str, Any]:
    """Returns the classes and functions of the script that a config refers to, by name."""
    found: dict[str, Any] = {}
    if isinstance(config, list | tuple):
        for one in config:
            found.update(_custom_objects(one))
    elif isinstance(config, dict):
        name = config.get("registered_name")
        custom = keras.saving.get_registered_object(name) if isinstance(name, str) else None
        if custom is not None:
            found[str(name)] = custom
        for value in config.values():
            found.update(_custom_objects(value))
    return found


def _described(rate: Any) -> Any:
    """Returns what identifies a schedule or a function of learning rates."""
    if not isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
        return {"name": getattr(rate, "__qualname__", type(rate).__qualname__)}
    try:
        return keras.saving.serialize_keras_object(rate)
    except NotImplementedError:  # a schedule that cannot be saved
        return {"name": type(rate).__qualname__, "config": _plain(vars(rate))}


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values that are the same in each process."""
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, bool | int | float | str | list | tuple | None)
    }


def _is_named(name: str, names: Sequence[str]) -> bool:
    """Returns True if a variable, or the variable of a shard, is among `names`."""
    return name in names or _SHARD.sub("", name) in names


def other_shapes(kind: type, names: Sequence[str]) -> NotImplementedError:
    """Returns the error of an optimizer with arrays that are no slot of a single variable."""
    return NotImplementedError(
        explain(
            f"{kind.__name__} has the arrays {names}, whose shapes do not match its variables.",
            expected="an optimizer whose arrays have the shapes of its variables, so that servers "
            "can shard both.",
            fix="use SGD, Adagrad or Adam, for example, under a ParameterServerStrategy.",
            code="SG609",
        )
    )


def scalar_names(variables: Sequence[Any]) -> list[str]:
    """Returns the names of an optimizer's scalars, given as variables in its order."""
    # Keras numbers variables without a name per process.
    return [
        f"scalar_{place}" if variable.name.startswith("variable") else variable.name
        for place, variable in enumerate(variables)
    ]


def _variable(name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> keras.Variable:
    """Returns a variable with that path: some optimizers treat variables by name."""
    *scopes, own = name.split("/")
    if scopes:
        with keras.name_scope(scopes[0]):
            return _variable("/".join([*scopes[1:], own]), shape, dtype)
    return keras.Variable(np.zeros(shape, dtype), name=own)


def _initial(variable: keras.Variable, kind: type, slot: str) -> float:
    value = np.asarray(variable.value, np.float64)
    if value.size and not (value == value.flat[0]).all():
        raise NotImplementedError(
            explain(
                f"The slot {slot!r} of {kind.__name__} has different initial values.",
                expected="a slot filled with a single initial value.",
                fix="use another optimizer under a ParameterServerStrategy.",
                code="SG609",
            )
        )
    return float(value.flat[0]) if value.size else 0.0
