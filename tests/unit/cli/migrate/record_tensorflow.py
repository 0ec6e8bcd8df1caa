"""Records TensorFlow's public names, where it is installed.

python tests/unit/cli/migrate/record_tensorflow.py

A class is listed with the parameters of its constructor, then its members. A member is listed
once: under the public class that defines it, or under the first one that inherits it from a
private class. A second name of the same object is listed without members.
"""

from __future__ import annotations

import enum
import inspect
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tensorflow as tf

LISTING = Path(__file__).with_name("tensorflow_symbols.txt")

# Listed with everything in them.
MODULES = ("tf.distribute", "tf.compat.v1.distribute", "tf.summary", "tf.data.experimental.service")
CLASSES = (
    "tf.GradientTape",
    "tf.VariableAggregation",
    "tf.VariableSynchronization",
    "tf.data.Dataset",
    "tf.data.experimental.AutoShardPolicy",
    "tf.data.experimental.DistributeOptions",
    "tf.data.experimental.ExternalStatePolicy",
    "tf.train.Checkpoint",
    "tf.train.CheckpointManager",
    "tf.train.CheckpointOptions",
    "tf.train.ClusterSpec",
    "tf.types.experimental.distributed.Mirrored",
    "tf.types.experimental.distributed.PerReplica",
)
# Listed alone.
NAMES = (
    "tf.Variable",
    "tf.Variable.assign",
    "tf.Variable.assign_add",
    "tf.Variable.assign_sub",
    "tf.Variable.read_value",
    "tf.Variable.value",
    "tf.IndexedSlices",
    "tf.config.LogicalDevice",
    "tf.config.LogicalDeviceConfiguration",
    "tf.config.PhysicalDevice",
    "tf.config.experimental.get_device_details",
    "tf.config.experimental.get_memory_info",
    "tf.config.experimental.set_memory_growth",
    "tf.config.experimental_connect_to_cluster",
    "tf.config.experimental_connect_to_host",
    "tf.config.get_logical_device_configuration",
    "tf.config.get_soft_device_placement",
    "tf.config.get_visible_devices",
    "tf.config.list_logical_devices",
    "tf.config.list_physical_devices",
    "tf.config.optimizer.set_jit",
    "tf.config.run_functions_eagerly",
    "tf.config.functions_run_eagerly",
    "tf.config.set_logical_device_configuration",
    "tf.config.set_soft_device_placement",
    "tf.config.set_visible_devices",
    "tf.config.threading.set_inter_op_parallelism_threads",
    "tf.config.threading.set_intra_op_parallelism_threads",
    "tf.data.FixedLengthRecordDataset",
    "tf.data.Iterator",
    "tf.data.Options",
    "tf.data.TFRecordDataset",
    "tf.data.TextLineDataset",
    "tf.device",
    "tf.function",
    "tf.io.gfile.exists",
    "tf.io.gfile.glob",
    "tf.io.gfile.isdir",
    "tf.io.gfile.listdir",
    "tf.io.gfile.makedirs",
    "tf.io.gfile.rmtree",
    "tf.io.gfile.GFile",
    "tf.nn.compute_average_loss",
    "tf.nn.embedding_lookup",
    "tf.nn.scale_regularization_loss",
    "tf.print",
    "tf.random.Generator",
    "tf.random.set_seed",
    "tf.saved_model.load",
    "tf.saved_model.save",
    "tf.tpu.experimental.DeviceAssignment",
    "tf.tpu.experimental.Topology",
    "tf.tpu.experimental.initialize_tpu_system",
    "tf.tpu.experimental.shutdown_tpu_system",
    "tf.train.checkpoints_iterator",
    "tf.train.get_checkpoint_state",
    "tf.train.latest_checkpoint",
    "tf.train.list_variables",
    "tf.train.load_checkpoint",
    "tf.train.load_variable",
)
_OPERATORS = ("__call__", "__iter__")


class Recorder:
    """Lines of the listing, and what is in them."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._names: dict[Any, str] = {}
        self._members: set[tuple[type, str]] = set()

    def add_module(self, path: str, module: types.ModuleType) -> None:
        values = [(f"{path}.{name}", getattr(module, name)) for name in _public(module)]
        # Classes first, from the bases down, so that a member is listed where it is defined.
        classes = [(name, value) for name, value in values if inspect.isclass(value)]
        for name, value in sorted(classes, key=lambda item: (len(item[1].__mro__), item[0])):
            self.add_class(name, value)
        for name, value in values:
            if isinstance(value, types.ModuleType):
                self.add_module(name, value)
            elif not inspect.isclass(value):
                self.lines.append(f"{name}{_parameters(value)}" if callable(value) else name)

    def add_class(self, path: str, cls: type) -> None:
        self.lines.append(f"{path}{_parameters(cls)}")
        if cls in self._names:
            return
        self._names[cls] = path
        for name, owner in _members(cls):
            if (owner, name) in self._members or self._is_override(cls, name):
                continue
            self._members.add((owner, name))
            member = inspect.getattr_static(cls, name)
            is_function = isinstance(member, classmethod | staticmethod | types.FunctionType)
            self.lines.append(
                f"{path}.{name}{_parameters(getattr(cls, name)) if is_function else ''}"
            )

    def _is_override(self, cls: type, name: str) -> bool:
        """Finds the same member, with the same parameters, in a listed base."""
        bases = [base for base in cls.__mro__[1:] if base in self._names and hasattr(base, name)]
        return any(
            not callable(getattr(base, name))
            or _parameters(getattr(base, name)) == _parameters(getattr(cls, name))
            for base in bases
        )


def _members(cls: type) -> Iterator[tuple[str, type]]:
    for name in sorted(dir(cls)):
        owner = next((base for base in cls.__mro__ if name in vars(base)), None)
        if owner is None or not owner.__module__.startswith("tensorflow"):
            continue
        if not name.startswith("_") or name in _OPERATORS:
            yield name, owner


def _public(module: types.ModuleType) -> list[str]:
    return [name for name in sorted(dir(module)) if not name.startswith("_")]


def _parameters(value: Any) -> str:
    if inspect.isclass(value) and issubclass(value, enum.Enum):
        return ""
    # `__new__(*args, **kwargs)` of a class says less than its `__init__`.
    is_made_by_new = inspect.isclass(value) and "__new__" in vars(value)
    hides = is_made_by_new and isinstance(vars(value).get("__init__"), types.FunctionType)
    try:
        parameters = inspect.signature(value.__init__ if hides else value).parameters.values()
    except (TypeError, ValueError):
        return ""
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    names = [f"{stars.get(parameter.kind, '')}{parameter.name}" for parameter in parameters]
    return f"({', '.join(name for name in names if name != 'self')})"


def _get(path: str) -> Any:
    value: Any = tf
    for part in path.split(".")[1:]:
        value = getattr(value, part)
    return value


def main() -> None:
    recorder = Recorder()
    for path in MODULES:
        recorder.add_module(path, _get(path))
    for path in CLASSES:
        recorder.add_class(path, _get(path))
    for path in NAMES:
        recorder.lines.append(f"{path}{_parameters(_get(path))}")
    lines = sorted(set(recorder.lines))
    LISTING.write_text("\n".join([f"# TensorFlow {tf.__version__}", *lines]) + "\n", "utf-8")


if __name__ == "__main__":
    main()
