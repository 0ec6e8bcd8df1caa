"""Objects that checkpoints can hold, taken apart into variables and JSON state."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

import keras

from stratagem.checkpoint.trees import Tree, is_tree
from stratagem.messages import explain
from stratagem.variables.registry import home_of
from stratagem.variables.sharded_variable import ShardedVariable

# The kind of a dict of variables, matched by name only.
NAMED_VARIABLES = "variables"
PYTREE = "pytree"


@runtime_checkable
class Stateful(Protocol):
    """An object whose state is JSON, such as an iterator over data."""

    def get_state(self) -> Any:
        """Returns the state."""
        ...

    def set_state(self, state: Any) -> None:
        """Restores a state that `get_state` returned, possibly in another process."""
        ...


@dataclasses.dataclass(frozen=True)
class Part:
    """One object of a checkpoint: its variables by path, in creation order, and its JSON state.

    `source` is None without JSON state. `tree` is the pytree with the variables as leaves, or None
    for objects that change in place. `kind` describes the object in messages.
    """

    name: str
    kind: str
    variables: dict[str, Any]
    source: Stateful | None = None
    tree: Tree | None = None

    @property
    def remote_tables(self) -> dict[str, tuple[Any, str]]:
        """Tables whose rows stay on servers, by path: those of the servers, and the name there."""
        tables = {path: getattr(one, "remote_table", None) for path, one in self.variables.items()}
        return {path: table for path, table in tables.items() if table is not None}


def part_of(name: str, value: object) -> Part:
    """Returns the variables and the state of an object.

    Raises TypeError for an unsupported object, ValueError if it has no variables yet.
    """
    if isinstance(value, keras.Variable | ShardedVariable):
        return Part(name, "variable", {"value": value})
    if isinstance(value, dict) and _holds_variables(value):
        return Part(name, NAMED_VARIABLES, dict(value))
    if isinstance(value, keras.Model):
        return _of_model(name, value)
    for kind, class_ in _KINDS.items():
        if isinstance(value, class_):
            if not getattr(value, "built", True):
                raise _not_built(name, kind, value)
            return part_by_path(name, kind, {"": _variables(value)})
    if isinstance(value, Stateful):
        return Part(name, "state", {}, value)
    if is_tree(value):
        tree = Tree(name, value)
        return Part(name, PYTREE, dict(tree.leaves), tree=tree)
    raise TypeError(
        explain(
            f"{name}={value!r} cannot be saved.",
            expected="a Keras model, layer, optimizer, metric, seed generator or variable, a dict "
            "of variables, a pytree of arrays, or an object with get_state() and set_state(), such "
            f"as an iterator of a distributed dataset; got {type(value).__name__}.",
            fix="store numbers in a keras.Variable: step = sg.Variable(0, dtype='int32').",
        )
    )


def state_of(part: Part) -> Any:
    """Returns the JSON state of an object; raises TypeError if JSON cannot hold it."""
    assert part.source is not None
    state = part.source.get_state()
    try:
        json.dumps(state)
    except TypeError as error:
        raise TypeError(
            explain(
                f"{part.name}.get_state() returned a value that JSON cannot store: {error}",
                expected="numbers, strings, booleans, None, and lists and dicts of them.",
                fix="wrap the object in one whose get_state() and set_state() convert the state.",
            )
        ) from error
    return state


def part_by_path(name: str, kind: str, groups: Mapping[str, Iterable[Any]]) -> Part:
    """Returns an object's part from variables by group; the group "" adds no prefix to the path."""
    variables = {
        f"{group}/{path}" if group else path: variable
        for group, members in groups.items()
        for path, variable in _by_path(members)
    }
    return Part(name, kind, variables)


def model_groups(model: keras.Model) -> dict[str, list[Any]]:
    """Returns a model's variables in the layout of `keras.Model.get_state_tree`."""
    optimizer = getattr(model, "optimizer", None)
    return {
        "trainable_variables": model.trainable_variables,
        "non_trainable_variables": model.non_trainable_variables,
        "optimizer_variables": [] if optimizer is None else optimizer.variables,
        "metrics_variables": model.metrics_variables,
    }


def _holds_variables(value: dict[Any, Any]) -> bool:
    """True for a dict of variables by name, or an empty one."""
    kinds = keras.Variable | ShardedVariable
    return all(isinstance(key, str) and isinstance(one, kinds) for key, one in value.items())


def _of_model(name: str, model: keras.Model) -> Part:
    if not model.built:
        raise _not_built(name, "model", model)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not optimizer.built:
        build_optimizer(optimizer, model)
    return part_by_path(name, "model", model_groups(model))


def build_optimizer(optimizer: keras.optimizers.Optimizer, model: keras.Model) -> None:
    """Builds the optimizer's variables under the strategy of the model's variables."""
    homes = [home_of(variable) for variable in model.variables]
    strategy = next((home.strategy for home in homes if home is not None), None)
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        optimizer.build(model.trainable_variables)


def _by_path(variables: Iterable[keras.Variable]) -> Iterable[tuple[str, keras.Variable]]:
    """Yields each variable with its path; duplicates of a path get a number."""
    seen: Counter[str] = Counter()
    for variable in variables:
        seen[variable.path] += 1
        number = seen[variable.path]
        yield variable.path if number == 1 else f"{variable.path}#{number}", variable


def _variables(value: _Holder) -> list[keras.Variable]:
    if isinstance(value, keras.random.SeedGenerator):
        return [value.state]
    return list(value.variables)


_Holder = (
    keras.Layer | keras.optimizers.Optimizer | keras.metrics.Metric | keras.random.SeedGenerator
)
_KINDS: dict[str, type[_Holder]] = {
    "layer": keras.Layer,
    "optimizer": keras.optimizers.Optimizer,
    "metric": keras.metrics.Metric,
    "seed generator": keras.random.SeedGenerator,
}


def _not_built(name: str, kind: str, value: object) -> ValueError:
    fix = {
        "optimizer": "call optimizer.build(model.trainable_variables) first.",
    }.get(kind, "build it, or call it with a batch, first.")
    return ValueError(
        explain(
            f"The {kind} {name}={value!r} has no variables yet.",
            expected="an object with variables, whose values can be saved or restored.",
            fix=fix,
            code="SG705",
        )
    )
