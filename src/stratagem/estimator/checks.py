"""Checks of arguments that Estimators, their specs, hooks and columns share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from stratagem.errors import check_type, explain, invalid

_T = TypeVar("_T")

# Arguments of TensorFlow that must be None here, and what to do instead.
_UNSUPPORTED = {
    "device_fn": "pass train_distribute=sg.OneDeviceStrategy(device) or another strategy.",
    "feed_dict": "return the value from input_fn as a feature.",
    "final_ops_feed_dict": "return the value from input_fn as a feature.",
    "receiver_tensors_alternatives": "export once per set of inputs.",
    "scaffold": "call sg.summary in the model function; a scaffold has no summaries.",
    "var_name_to_vocab_info": "keep the vocabulary, or exclude these tables from "
    "vars_to_warm_start.",
}


def check_unsupported(name: str, value: object) -> None:
    """Raises NotImplementedError unless an argument that must be None is None."""
    if value is not None:
        raise NotImplementedError(
            explain(f"{name}={value!r} is not supported.", expected="None.", fix=_UNSUPPORTED[name])
        )


def check_instances(name: str, values: object, kind: type[_T]) -> tuple[_T, ...]:
    """Returns a list or tuple of instances of a class as a tuple; an empty one for None."""

    def is_valid(items: object) -> bool:
        return isinstance(items, list | tuple) and all(isinstance(item, kind) for item in items)

    items = () if values is None else values
    check_type(name, items, is_valid, f"a list or tuple of {kind.__name__} objects, or None")
    return tuple(items)  # pyright: ignore[reportArgumentType]


def check_one_of(owner: str, *, is_required: bool = True, **values: object) -> None:
    """Raises ValueError unless exactly one of the values is set, or at most one."""
    num_set = sum(value is not None for value in values.values())
    if num_set > 1 or (is_required and not num_set):
        given = " and ".join(f"{name}={value!r}" for name, value in values.items())
        raise invalid(
            f"{owner} received {given}.",
            f"{'exactly' if is_required else 'at most'} one of the two.",
            f"pass either {' or '.join(values)}, and leave the other None.",
        )


def check_known(what: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Raises ValueError if some names are unknown."""
    known = list(known)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise invalid(
            f"{what} received the unknown names {unknown}.",
            f"names among {known}.",
            "correct the names.",
        )
