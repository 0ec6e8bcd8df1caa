"""Export of prediction as compiled programs: inputs, outputs, writing and loading."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import keras
import numpy as np

from stratagem import contexts as stack
from stratagem.checkpoint.checkpoint import Checkpoint
from stratagem.checkpoint.latest import run_on_first
from stratagem.environment import load
from stratagem.errors import check_type, invalid
from stratagem.estimator.checks import check_unsupported
from stratagem.estimator.spec import DEFAULT_SIGNATURE, EstimatorSpec
from stratagem.estimator.steps import VARIABLES, ModelStep, read_values
from stratagem.execution.communicator import SoleCommunicator
from stratagem.execution.replica_context import ReplicaBatch, ReplicaContext
from stratagem.execution.tracing.functionalize import ReplicaScope, initialize_created_variables

__all__ = [
    "ClassificationOutput",
    "ExportOutput",
    "PredictOutput",
    "RegressionOutput",
    "ServingInputReceiver",
    "build_raw_serving_input_receiver_fn",
]


class ExportOutput:
    """Base class for the outputs of one exported signature.

    Example:
        >>> class Ranking(sg.estimator.export.ExportOutput):
        ...     def __init__(self, order):
        ...         self.order = order
        ...     @property
        ...     def outputs(self):
        ...         return {"order": self.order}
        >>> sorted(Ranking([2, 0, 1]).outputs)
        ['order']

    Source: TF 2.21 export_output.py, ExportOutput.
    """

    @property
    def outputs(self) -> dict[str, Any]:
        """Output arrays by name."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, eq=False)
class PredictOutput(ExportOutput):
    """Arbitrary outputs.

    Args:
        predictions: an array, exported as "output", or a dict of arrays.

    Example:
        >>> sorted(sg.estimator.export.PredictOutput({"classes": 1, "logits": 2}).outputs)
        ['classes', 'logits']

    Source: TF 2.21 export_output.py, PredictOutput.
    """

    predictions: Any

    @property
    def outputs(self) -> dict[str, Any]:
        """The predictions by name."""
        if isinstance(self.predictions, Mapping):
            return dict(self.predictions)
        return {"output": self.predictions}


@dataclasses.dataclass(frozen=True, eq=False)
class ClassificationOutput(ExportOutput):
    """Outputs of a classifier.

    Args:
        scores: the score of each class, shape (batch, classes).
        classes: class ids, shape (batch, ...).

    Raises:
        ValueError: if both are None.

    Example:
        >>> sorted(sg.estimator.export.ClassificationOutput(scores=np.ones((1, 2))).outputs)
        ['scores']

    Source: TF 2.21 export_output.py, ClassificationOutput.
    """

    scores: Any = None
    classes: Any = None

    def __post_init__(self) -> None:
        if self.scores is None and self.classes is None:
            raise ValueError("ClassificationOutput received neither scores nor classes.")

    @property
    def outputs(self) -> dict[str, Any]:
        """Scores and classes, whichever are set."""
        both = {"scores": self.scores, "classes": self.classes}
        return {name: value for name, value in both.items() if value is not None}


@dataclasses.dataclass(frozen=True, eq=False)
class RegressionOutput(ExportOutput):
    """Output of a regression.

    Args:
        value: one number per example, shape (batch, ...).

    Example:
        >>> sorted(sg.estimator.export.RegressionOutput(np.ones(3)).outputs)
        ['outputs']

    Source: TF 2.21 export_output.py, RegressionOutput.
    """

    value: Any

    @property
    def outputs(self) -> dict[str, Any]:
        """The value, named "outputs"."""
        return {"outputs": self.value}


# ServingInputReceiver: inputs of an exported model and the features computed from them.


# TensorFlow's name for a single unnamed input.
_SOLE_INPUT = "input"


@dataclasses.dataclass(frozen=True)
class InputSpec:
    """Shape and dtype of one input; None in the shape means any size."""

    shape: tuple[int | None, ...]
    dtype: str


@dataclasses.dataclass(frozen=True, eq=False)
class ServingInputReceiver:
    """Inputs of an exported model, and the features that the model function gets from them.

    Inputs are `keras.Input`, `keras.KerasTensor` or `jax.ShapeDtypeStruct` objects. Features may
    be computed from the first two with Keras operations and layers.

    Args:
        features: the features for `model_fn`: the inputs or values computed from them, in the
            structure that `input_fn` returns.
        receiver_tensors: a dict of inputs by name, or a single input, named "input".
        receiver_tensors_alternatives: must be None.

    Raises:
        NotImplementedError: if alternatives are set.
        TypeError: if an input has another type.

    Example:
        >>> pixels = keras.Input((28, 28), dtype="uint8", name="pixels")
        >>> features = keras.ops.cast(pixels, "float32") / 255.0
        >>> receiver = sg.estimator.export.ServingInputReceiver(features, {"pixels": pixels})
        >>> receiver.inputs["pixels"].shape
        (None, 28, 28)

    Source: tensorflow/estimator export.py, ServingInputReceiver.
    """

    features: Any
    receiver_tensors: Any
    receiver_tensors_alternatives: Any = None

    def __post_init__(self) -> None:
        alternatives = self.receiver_tensors_alternatives
        check_unsupported("receiver_tensors_alternatives", alternatives or None)
        wanted = "keras.Input(...) or jax.ShapeDtypeStruct(...), without values"
        for value in jax.tree.leaves((self.features, self._named)):
            kind = keras.KerasTensor | jax.ShapeDtypeStruct
            check_type("An input of ServingInputReceiver", value, kind, wanted)

    @property
    def inputs(self) -> dict[str, InputSpec]:
        """Inputs by name."""
        return {
            name: InputSpec(tuple(one.shape), keras.backend.standardize_dtype(one.dtype))
            for name, one in self._named.items()
        }

    @property
    def _named(self) -> dict[str, Any]:
        inputs = self.receiver_tensors
        return dict(inputs) if isinstance(inputs, Mapping) else {_SOLE_INPUT: inputs}

    def features_of(self, values: Mapping[str, Any]) -> Any:
        """Computes the features from input values.

        Args:
            values: arrays by input name.

        Returns:
            The features, in the structure of `features`.

        Raises:
            ValueError: if a feature is neither an input nor computed from inputs.
        """
        inputs = list(self._named.values())
        given = [values[name] for name in self._named]
        found = dict(zip(map(id, inputs), given, strict=True))
        features, structure = jax.tree.flatten(self.features)
        computed = [one for one in features if id(one) not in found]
        if not computed:
            return jax.tree.unflatten(structure, [found[id(one)] for one in features])
        try:
            if any(isinstance(one, jax.ShapeDtypeStruct) for one in (*inputs, *computed)):
                raise ValueError("a feature is not an input.")
            function = keras.Function(inputs, computed)
        except ValueError as error:
            raise ValueError(
                f"Features cannot be computed by Keras from the receiver_tensors: {error}"
            ) from error
        found |= zip(map(id, computed), jax.tree.leaves(function(given)), strict=True)
        return jax.tree.unflatten(structure, [found[id(one)] for one in features])


def build_raw_serving_input_receiver_fn(
    features: object, default_batch_size: int | None = None
) -> Callable[[], ServingInputReceiver]:
    """Returns a `serving_input_receiver_fn` for features that are served unchanged.

    Args:
        features: a `keras.Input`, `jax.ShapeDtypeStruct` or array, or a dict of them. Only shapes
            and dtypes matter. Axis 0 is the batch.
        default_batch_size: the only batch size that the export accepts; None for any.

    Returns:
        A function without arguments.

    Example:
        >>> receiver_fn = sg.estimator.export.build_raw_serving_input_receiver_fn(
        ...     {"x": jax.ShapeDtypeStruct((1, 4), "float32")}
        ... )
        >>> receiver_fn().inputs["x"].shape
        (None, 4)

    Source: tensorflow/estimator export.py, build_raw_serving_input_receiver_fn.
    """

    def receiver() -> ServingInputReceiver:
        specs = jax.tree.map(
            lambda one: keras.KerasTensor((default_batch_size, *one.shape[1:]), one.dtype),
            features,
        )
        return ServingInputReceiver(specs, specs)

    return receiver


# Exported models: file format, loading and calling.

VARIABLES_FOLDER = "variables"
_SIGNATURES_FILE = "signatures.json"
_FORMAT = 1


@dataclasses.dataclass(frozen=True, eq=False)
class Signature:
    """Callable function of an exported model: its inputs, outputs and variables by name."""

    name: str
    inputs: Mapping[str, InputSpec]
    outputs: tuple[str, ...]
    # Not shown: hundreds of names, a serialized program, and all values.
    variables: tuple[str, ...] = dataclasses.field(repr=False)
    exported: jax.export.Exported = dataclasses.field(repr=False)
    values: Sequence[Any] = dataclasses.field(default=(), repr=False)  # of the variables

    @functools.cached_property
    def _compiled(self) -> Callable[..., Any]:
        return jax.jit(self.exported.call)

    def __call__(self, *args: object, **kwargs: object) -> dict[str, Any]:
        """Calls the function with named inputs, a dict, or a sole input; returns NumPy arrays."""
        values = dict(kwargs)
        if len(args) == 1 and not kwargs:
            sole = next(iter(self.inputs))
            values = dict(args[0]) if isinstance(args[0], Mapping) else {sole: args[0]}
        if set(values) != set(self.inputs) or len(args) > 1:
            raise ValueError(
                f"The signature {self.name!r} was called with {sorted(values)} and "
                f"{len(args)} positional arguments: pass {sorted(self.inputs)} by name."
            )
        arrays = {
            name: jnp.asarray(np.asarray(values[name]), spec.dtype)
            for name, spec in self.inputs.items()
        }
        outputs = self._compiled(list(self.values), arrays)
        return {name: np.asarray(value) for name, value in outputs.items()}


def _write_signatures(folder: Path, signatures: Iterable[Signature], *, as_text: bool) -> None:
    load("flatbuffers", needed_by="An exported model", install="'stratagem[checkpoint]'")
    described: dict[str, Any] = {}
    for number, one in enumerate(signatures):
        file = f"function_{number}"
        (folder / f"{file}.jax_export").write_bytes(one.exported.serialize())
        if as_text:
            (folder / f"{file}.mlir").write_text(one.exported.mlir_module())
        described[one.name] = {
            "file": f"{file}.jax_export",
            "inputs": {key: dataclasses.asdict(spec) for key, spec in one.inputs.items()},
            "outputs": one.outputs,
            "variables": one.variables,
        }
    text = json.dumps({"format": _FORMAT, "signatures": described}, indent=1)
    (folder / _SIGNATURES_FILE).write_text(text)


class ExportedModel(dict[str, Signature]):
    """Mapping from signature names to callable functions. Created by `load_exported`.

    Example:
        >>> import tempfile
        >>> x, example = sg.feature_column.numeric_column("x"), np.zeros((1, 1), "float32")
        >>> regressor = sg.estimator.LinearRegressor([x])
        >>> data = lambda: ({"x": np.float32([0, 1])}, np.array([1.0, 3.0]))
        >>> receiver = sg.estimator.export.build_raw_serving_input_receiver_fn({"x": example})
        >>> path = regressor.train(data, steps=1).export_saved_model(tempfile.mkdtemp(), receiver)
        >>> model = sg.estimator.load_exported(path)
        >>> sorted(model), list(model["predict"].inputs)
        (['predict', 'regression', 'serving_default'], ['x'])

    Source: TF 2.21 saved_model/load.py, load.
    """

    @property
    def signatures(self) -> Mapping[str, Signature]:
        """Functions by signature name."""
        return dict(self)


def load_exported(path: str | os.PathLike[str]) -> ExportedModel:
    """Loads an export of `Estimator.export_saved_model`; the model function is not needed.

    Args:
        path: the folder that `export_saved_model` returned.

    Returns:
        Functions by signature name. Each takes arrays by name, in any batch size unless the export
        fixed it, and returns a dict of arrays.

    Raises:
        ValueError: if the folder contains no exported model.

    Example:
        >>> import tempfile
        >>> x, example = sg.feature_column.numeric_column("x"), np.zeros((1, 1), "float32")
        >>> regressor = sg.estimator.LinearRegressor(
        ...     [x], optimizer=lambda: keras.optimizers.SGD(0.5))
        >>> data = lambda: ({"x": np.float32([0, 1])}, np.array([1.0, 3.0]))
        >>> receiver = sg.estimator.export.build_raw_serving_input_receiver_fn({"x": example})
        >>> path = regressor.train(data, steps=200).export_saved_model(tempfile.mkdtemp(), receiver)
        >>> model = sg.estimator.load_exported(path)
        >>> model["predict"](x=np.float32([[0], [1], [2]]))["predictions"].round(2).ravel().tolist()
        [1.0, 3.0, 5.0]

    Source: TF 2.21 saved_model/load.py, load.
    """
    folder = Path(os.fspath(path))
    file = folder / _SIGNATURES_FILE
    if not file.is_file():
        raise ValueError(
            f"{folder} contains no exported model: pass the path that export_saved_model returned."
        )
    load("flatbuffers", needed_by="An exported model", install="'stratagem[checkpoint]'")
    described = json.loads(file.read_text())
    if described["format"] != _FORMAT:
        raise ValueError(
            f"{folder} was exported by another version of Stratagem: load it with that version."
        )
    values = jax.tree.map(jnp.asarray, read_values(str(folder / VARIABLES_FOLDER)))
    model = ExportedModel()
    for name, one in described["signatures"].items():
        model[name] = Signature(
            name,
            {key: InputSpec(tuple(x["shape"]), x["dtype"]) for key, x in one["inputs"].items()},
            tuple(one["outputs"]),
            tuple(one["variables"]),
            jax.export.deserialize(bytearray((folder / one["file"]).read_bytes())),
            [values[variable] for variable in one["variables"]],
        )
    return model


_PLATFORMS = ("cpu", "cuda", "tpu")
_ASSETS_FOLDER = "assets.extra"


def export_prediction(
    step: ModelStep,
    serving_input_receiver_fn: Callable[[], Any],
    initialize: Callable[[EstimatorSpec], None],
    base: str,
    assets: Mapping[str, str],
    *,
    as_text: bool,
) -> str:
    """Writes an export and returns its folder. Call on every process; process 0 writes.

    `initialize` sets the variables once they exist. The folder appears under its final name, the
    time in seconds, only when complete.
    """
    receiver = serving_input_receiver_fn()
    check_type("The result of serving_input_receiver_fn", receiver, ServingInputReceiver)

    def serve(values: list[Any], inputs: dict[str, Any], *, name: str | None = None) -> Any:
        """Predicts as a pure function of variable values and inputs; None is the default."""
        variables = step.store.named.values() if values else ()
        of_variable = {id(one): value for one, value in zip(variables, values, strict=True)}
        context = ReplicaContext(step.strategy, 0, SoleCommunicator(), ReplicaBatch())
        frame = stack.push(stack.FrameKind.REPLICA, step.strategy, context)
        with frame, ReplicaScope(lambda variable: of_variable.get(id(variable))):
            features = receiver.features_of(inputs)
            try:
                step.call(features, None)
            except Exception as error:
                if not any(None in one.shape for one in receiver.inputs.values()):
                    raise
                raise invalid(
                    f"The model function cannot be exported for arbitrary batch sizes: {error}",
                    "a model function that does not depend on the batch size.",
                    "use keras.ops.shape(x) for sizes; or export for one size with "
                    "build_raw_serving_input_receiver_fn(features, default_batch_size=n).",
                ) from error
        assert step.spec is not None
        outputs = _outputs_of(step.spec)
        chosen = outputs[next(iter(outputs)) if name is None else name]
        return {key: jnp.asarray(value) for key, value in chosen.outputs.items()}

    shapes = _shapes(receiver)
    jax.eval_shape(serve, [], shapes)  # a call of the model function creates the variables
    initialize_created_variables(step.strategy)
    assert step.spec is not None
    initialize(step.spec)
    named = step.store.named
    values = [jax.ShapeDtypeStruct(variable.shape, variable.dtype) for variable in named.values()]
    signatures: list[Signature] = []
    for name, output in _outputs_of(step.spec).items():
        function = jax.jit(functools.partial(serve, name=name))
        exported = jax.export.export(function, platforms=_PLATFORMS)(values, shapes)
        signatures.append(
            Signature(name, receiver.inputs, tuple(output.outputs), tuple(named), exported)
        )
    folder, number = run_on_first("export_saved_model", lambda: _make_temporary_folder(base))
    Checkpoint(**{VARIABLES: named}).write(os.path.join(folder, VARIABLES_FOLDER))

    def finish() -> str:
        _write_signatures(Path(folder), signatures, as_text=as_text)
        for target, source in assets.items():
            path = Path(folder, _ASSETS_FOLDER, target)
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, path)
        final = Path(base, number)
        Path(folder).rename(final)
        return str(final)

    return run_on_first("export_saved_model", finish)


def _outputs_of(spec: EstimatorSpec) -> dict[str, ExportOutput]:
    outputs = spec.export_outputs or {DEFAULT_SIGNATURE: PredictOutput(spec.predictions)}
    for name, output in outputs.items():
        wanted = "a PredictOutput, ClassificationOutput or RegressionOutput"
        check_type(f"export_outputs[{name!r}]", output, ExportOutput, wanted)
    return dict(outputs)


def _shapes(receiver: ServingInputReceiver) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns input shapes with symbols for unknown sizes; all batch sizes share one symbol."""
    scope = jax.export.SymbolicScope()
    shapes: dict[str, jax.ShapeDtypeStruct] = {}
    for number, (name, spec) in enumerate(receiver.inputs.items()):
        symbols = [
            str(size) if size is not None else "batch" if axis == 0 else f"size_{number}_{axis}"
            for axis, size in enumerate(spec.shape)
        ]
        shape = jax.export.symbolic_shape(", ".join(symbols), scope=scope) if symbols else ()
        shapes[name] = jax.ShapeDtypeStruct(shape, spec.dtype)
    return shapes


def _make_temporary_folder(base: str) -> list[str]:
    """Creates a temporary folder and reserves the export's name."""
    Path(base).mkdir(parents=True, exist_ok=True)
    number = int(time.time())
    while any(Path(base, name).exists() for name in (str(number), f"temp-{number}")):
        number += 1
    folder = Path(base, f"temp-{number}")
    folder.mkdir()
    return [str(folder), str(number)]
