"""Variables that a user puts on a device by name, in a block of `keras.device`.

Without this, a strategy that keeps a variable on all its devices would ignore the block.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from typing import Any

from stratagem.devices.devices import find_devices
from stratagem.execution.context.explicit_device import explicit_device, naming_device
from stratagem.messages import explain
from stratagem.variables.kind import VariableKind
from stratagem.variables.placement import sole_device
from stratagem.variables.registry import Home


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
    raise ValueError(
        explain(
            f"Variable {path!r} was created in keras.device({name!r}), in the scope of {strategy}.",
            expected="no device for a single variable: the strategy places its variables. A "
            "HybridStrategy accepts one, except for ON_READ variables.",
            fix="remove keras.device, or use sg.HybridStrategy.",
            code="SG208",
        )
    )
