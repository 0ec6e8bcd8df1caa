"""Distributed training for Keras 3 on JAX: `tf.distribute.Strategy` without TensorFlow.

Importing this package loads neither JAX nor Keras; it selects Keras's JAX backend unless another
one was chosen. Import it before Keras. `__init__.pyi` lists the public names.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from stratagem import environment as _environment
from stratagem import logs as _logs
from stratagem import settings as _settings
from stratagem.errors import OLD_NAMES as _OLD_NAMES

__version__ = "0.1.0"

_WITHOUT_JAX = (
    "stratagem.cluster",
    "stratagem.config",
    "stratagem.devices.communication",
    "stratagem.devices.compression",
    "stratagem.devices.local_updates",
    "stratagem.errors",
    "stratagem.launch",
    "stratagem.observe.goodput",
    "stratagem.options",
    "stratagem.parameter_server.partitioners",
    "stratagem.strategies.placement",
)

_environment.select_keras_backend()
_logs.attach_handler()
if _settings.read("keep_freed_memory"):
    _environment.keep_freed_memory()


@functools.cache
def public_names() -> dict[str, tuple[str, str]]:
    """Returns the module of each public name, and its name there; read at the first use of one."""
    import ast
    from pathlib import Path

    stub = ast.parse(Path(__file__).with_suffix(".pyi").read_text())
    names: dict[str, tuple[str, str]] = {}
    for node in stub.body:
        if isinstance(node, ast.ImportFrom):
            names.update(
                (one.asname or one.name, (node.module or "", one.name)) for one in node.names
            )
        elif isinstance(node, ast.Assign):  # another name of an import
            names[ast.unparse(node.targets[0])] = names.pop(ast.unparse(node.value))
    return names


def __getattr__(name: str) -> Any:
    if name in _OLD_NAMES:
        raise AttributeError(
            f"module 'stratagem' has no attribute {name!r}\nExpected a name of this library.\n"
            f"Fix: use {_OLD_NAMES[name]}."
        )
    if name == "__all__":
        return sorted(public_names())
    if name.startswith("_") or name not in public_names():
        raise AttributeError(f"module 'stratagem' has no attribute {name!r}")
    package, attribute = public_names()[name]
    full_name = f"{package}.{attribute}"
    if not full_name.startswith(_WITHOUT_JAX):
        # Every name that needs JAX also needs the Keras integration and the default strategy.
        importlib.import_module("stratagem.keras")
    value = None
    if package != __name__:
        value = getattr(importlib.import_module(package), attribute, None)
    if value is None:
        value = importlib.import_module(full_name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(public_names())  # what completion offers
