"""What Keras keeps by the ids of objects, or changes in a class with its first object.

An object that comes from another process has neither: its parts have other ids there, and its
class may have made no object yet.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import keras
from keras.src.models.functional import Functional
from keras.src.models.model import inject_functional_model_class
from keras.src.ops.function import Function, make_node_key
from keras.src.saving.keras_saveable import KerasSaveable
from keras.src.utils.tracking import Tracker

from stratagem.keras.private.access import as_open


def taken_apart(obj: object) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the attributes of an object, and the objects whose ids are in some of them."""
    state = {**vars(obj)}
    referred: dict[str, Any] = {}
    if isinstance(obj, Tracker):
        stored = state.pop("stored_ids")
        referred["stored_ids"] = {
            name: [one for one in store if id(one) in stored[name]]
            for name, (_, store) in obj.config.items()
        }
    if isinstance(obj, Function) and "_nodes" in state:
        keys = state.pop("_nodes")
        calls = [
            (operation, number)
            for operation in obj.operations
            for number in range(len(as_open(operation)._inbound_nodes))
        ]
        referred["_nodes"] = [call for call in calls if make_node_key(*call) in keys]
    if isinstance(obj, keras.optimizers.Optimizer):
        referred.update(_of_variables(obj, state))
    if isinstance(obj, keras.layers.Layer):
        state["_loss_ids"] = set()  # of losses of an earlier call
        for name, code in _codes_of_new_layer().items():
            if getattr(state.get(name), "__code__", None) is code:
                del state[name]  # a new object has its own
    return state, referred


@functools.cache
def _codes_of_new_layer() -> dict[str, Any]:
    """Returns the code of the functions that Keras gives each layer, by attribute."""
    attributes = vars(keras.layers.Layer())
    return {name: value.__code__ for name, value in attributes.items() if inspect.isfunction(value)}


def _of_variables(optimizer: Any, state: dict[str, Any]) -> dict[str, list[tuple[int, Any]]]:
    """Returns the variables behind the ids in each table of an optimizer."""
    known = {id(one): one for one in (*state["_trainable_variables"], *optimizer.variables)}
    tables = {
        name: value
        for name, value in state.items()
        if isinstance(value, dict | set) and value and all(type(key) is int for key in value)
    }
    return {
        name: [(key, known[key]) for key in table if key in known] for name, table in tables.items()
    }


def set_referred(made: object, referred: dict[str, Any]) -> None:
    """Sets what an object of another process has by ids."""
    for name, objects in referred.items():
        if isinstance(made, Tracker):
            made.stored_ids = {store: set(map(id, own)) for store, own in objects.items()}
        elif isinstance(made, Function):
            vars(made)[name] = {make_node_key(*call) for call in objects}
        else:  # a table of an optimizer
            _set_keys(vars(made)[name], dict(objects))


def _set_keys(table: Any, variables: dict[int, Any]) -> None:
    """Replaces ids of another process by those of this one's variables, without tracking."""
    if isinstance(table, set):
        set.clear(table)
        set.update(table, map(id, variables.values()))
        return
    values = {id(variables[key]): value for key, value in table.items() if key in variables}
    dict.clear(table)
    dict.update(table, values)


def blank_object(kind: type[KerasSaveable | Tracker], is_functional: bool) -> Any:
    """Returns an object without attributes, for which everything else happens as for a new one.

    A class of the user becomes one of functional models with its first functional model.
    """
    if is_functional and not issubclass(kind, Functional):
        inject_functional_model_class(kind)
    for base in (keras.Model, keras.layers.Layer, keras.metrics.Metric):
        if issubclass(kind, base):
            return base.__new__(kind)
    return object.__new__(kind)
