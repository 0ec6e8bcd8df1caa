"""Distributed training for Keras 3 on JAX: `tf.distribute.Strategy` without TensorFlow.

Importing this package loads neither JAX nor Keras; it selects Keras's JAX backend unless another
one was chosen. Import it before Keras. `__init__.pyi` lists the public names.
"""

from __future__ import annotations

import functools
import importlib
import sys
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

# Other spellings, and helpers of TensorFlow that few programs call, by package: they work, but
# `__all__`, completion and the reference leave them out, so that each name is listed once.
# Namespaces without a stub leave theirs out of their own `__all__`.
_UNLISTED: dict[str, tuple[str, ...]] = {
    "stratagem": (
        "Checkpoint",
        "CheckpointManager",
        "CollectiveAllReduceStrategy",
        "CollectiveCommunication",
        "CollectiveHints",
        "Mirrored",
        "experimental",
        "experimental_set_strategy",
        "profiling",
        "regroup",
        "run_standard_tensorflow_server",
        "select_replica",
    ),
    "stratagem.checkpoint": (
        "Checkpoint",
        "CheckpointManager",
        "CheckpointOptions",
        "PreemptionCheckpointHandler",
        "checkpoints_iterator",
        "latest_checkpoint",
        "list_variables",
        "load_checkpoint",
        "load_variable",
    ),
    "stratagem.cluster": (
        "ClusterDef",
        "ClusterResolver",
        "ClusterSpec",
        "GCEClusterResolver",
        "JobDef",
        "KubernetesClusterResolver",
        "KubernetesExecutableLocation",
        "ProcessClusterResolver",
        "SageMakerClusterResolver",
        "SimpleClusterResolver",
        "SlurmClusterResolver",
        "TFConfigClusterResolver",
        "TPUClusterResolver",
        "TPUSystemMetadata",
        "UnionResolver",
        "collective_leader",
        "id_in_cluster",
        "is_chief",
        "normalize_cluster_spec",
        "task_count",
        "worker_count",
    ),
    "stratagem.cluster.preemption": ("PreemptionWatcher", "TerminationConfig"),
    "stratagem.estimator": ("experimental", "get_global_step", "get_or_create_global_step"),
}

_environment.select_keras_backend()
_logs.attach_handler()
if _settings.read("keep_freed_memory"):
    _environment.keep_freed_memory()


@functools.cache
def public_names(file: str = __file__) -> dict[str, tuple[str, str]]:
    """Returns the module of each public name, and its name there, from the stub of a package."""
    import ast
    from pathlib import Path

    stub = ast.parse(Path(file).with_suffix(".pyi").read_text())
    names: dict[str, tuple[str, str]] = {}
    for node in stub.body:
        if isinstance(node, ast.ImportFrom):
            names.update(
                (one.asname or one.name, (node.module or "", one.name)) for one in node.names
            )
        elif isinstance(node, ast.Assign):  # another name of an import
            names[ast.unparse(node.targets[0])] = names.pop(ast.unparse(node.value))
    return names


def listed_names(package: str, file: str) -> list[str]:
    """Returns the public names of a package in the one spelling that is listed."""
    return sorted(public_names(file).keys() - _UNLISTED.get(package, ()))


def load_name(package: str, file: str, name: str) -> Any:
    """Returns a public name of a package, which is loaded at its first use."""
    names = public_names(file)
    if name == "__all__":
        return listed_names(package, file)
    if name.startswith("_") or name not in names:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    module, attribute = names[name]
    full_name = f"{module}.{attribute}"
    if not full_name.startswith(_WITHOUT_JAX):
        # Every name that needs JAX also needs the Keras integration and the default strategy.
        importlib.import_module("stratagem.keras")
    value = None
    if module != package:
        value = getattr(importlib.import_module(module), attribute, None)
    if value is None:
        value = importlib.import_module(full_name)
    setattr(sys.modules[package], name, value)
    return value


def __getattr__(name: str) -> Any:
    if name in _OLD_NAMES:
        raise AttributeError(
            f"module 'stratagem' has no attribute {name!r}\nExpected a name of this library.\n"
            f"Fix: use {_OLD_NAMES[name]}."
        )
    return load_name(__name__, __file__, name)


def __dir__() -> list[str]:
    return listed_names(__name__, __file__)  # what completion offers
