"""Export of a model function's predictions as programs for any batch size."""

from __future__ import annotations

import dataclasses
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp

from stratagem import contexts as stack
from stratagem.checkpoint.checkpoint import Checkpoint
from stratagem.checkpoint.group_calls import run_on_first
from stratagem.estimator.exporting.export_output import ExportOutput, PredictOutput
from stratagem.estimator.exporting.exported_model import (
    VARIABLES_FOLDER,
    Signature,
    write_signatures,
)
from stratagem.estimator.exporting.serving import ServingInputReceiver
from stratagem.estimator.spec import DEFAULT_SIGNATURE, EstimatorSpec
from stratagem.estimator.steps.checkpoints import VARIABLES
from stratagem.estimator.steps.model_step import ModelStep
from stratagem.execution.communicator import SoleCommunicator
from stratagem.execution.context.batch import ReplicaBatch
from stratagem.execution.context.replica import ReplicaContext
from stratagem.execution.tracing.created_variables import initialize_created_variables
from stratagem.execution.tracing.functionalize import ReplicaScope
from stratagem.messages import explain

_PLATFORMS = ("cpu", "cuda", "tpu")
_ASSETS_FOLDER = "assets.extra"


def check_receiver(function: object) -> ServingInputReceiver:
    """Calls a `serving_input_receiver_fn` and checks its result."""
    receiver = function() if callable(function) else function
    if not callable(function) or not isinstance(receiver, ServingInputReceiver):
        raise TypeError(
            explain(
                f"serving_input_receiver_fn={function!r} returned {receiver!r}.",
                expected="a function that returns an sg.estimator.export.ServingInputReceiver.",
                fix="pass sg.estimator.export.build_raw_serving_input_receiver_fn(features).",
            )
        )
    return receiver


def make_variables(step: ModelStep, receiver: ServingInputReceiver) -> EstimatorSpec:
    """Creates the variables of prediction by calling the model function once."""
    jax.eval_shape(_ServingFunction(step, receiver).outputs, [], _shapes(receiver))
    initialize_created_variables(step.strategy)
    assert step.spec is not None
    return step.spec


def signatures_of(step: ModelStep, receiver: ServingInputReceiver) -> dict[str, Signature]:
    """Traces and exports the function of each signature."""
    named = step.store.named
    values = [jax.ShapeDtypeStruct(variable.shape, variable.dtype) for variable in named.values()]
    assert step.spec is not None
    signatures: dict[str, Signature] = {}
    for name, output in _outputs_of(step.spec).items():
        serving = _ServingFunction(step, receiver, name)
        exported = jax.export.export(jax.jit(serving.outputs), platforms=_PLATFORMS)(
            values, _shapes(receiver)
        )
        signatures[name] = Signature(receiver.inputs, tuple(output.outputs), tuple(named), exported)
    return signatures


def write_export(
    base: str,
    step: ModelStep,
    signatures: Mapping[str, Signature],
    assets: Mapping[str, str],
    *,
    as_text: bool,
) -> str:
    """Writes an export and returns its folder. Call on every process; process 0 writes.

    The folder appears under its final name, the time in seconds, only when complete.
    """
    folder, name = run_on_first("export_saved_model", lambda: _make_temporary_folder(base))
    Checkpoint(**{VARIABLES: step.store.named}).write(os.path.join(folder, VARIABLES_FOLDER))

    def finish() -> str:
        write_signatures(Path(folder), signatures, as_text=as_text)
        for target, source in assets.items():
            path = Path(folder, _ASSETS_FOLDER, target)
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, path)
        final = Path(base, name)
        Path(folder).rename(final)
        return str(final)

    return run_on_first("export_saved_model", finish)


@dataclasses.dataclass(frozen=True, eq=False)
class _ServingFunction:
    """Prediction as a pure function of variable values and inputs; default signature if None."""

    step: ModelStep
    receiver: ServingInputReceiver
    signature: str | None = None

    def outputs(self, values: list[Any], inputs: dict[str, Any]) -> dict[str, Any]:
        step = self.step
        variables = step.store.named.values() if values else ()
        of_variable = {id(one): value for one, value in zip(variables, values, strict=True)}
        context = ReplicaContext(step.strategy, 0, SoleCommunicator(), ReplicaBatch())
        frame = stack.push(stack.FrameKind.REPLICA, step.strategy, context)
        with frame, ReplicaScope(lambda variable: of_variable.get(id(variable))):
            features = self.receiver.features_of(inputs)
            try:
                spec = step.call(features, None).spec
            except Exception as error:
                if not self._takes_any_size:
                    raise
                raise _fixed_size_error(error) from error
        outputs = _outputs_of(spec)
        chosen = next(iter(outputs.values())) if self.signature is None else outputs[self.signature]
        return {name: jnp.asarray(value) for name, value in chosen.outputs.items()}

    @property
    def _takes_any_size(self) -> bool:
        return any(None in spec.shape for spec in self.receiver.inputs.values())


def _outputs_of(spec: EstimatorSpec) -> dict[str, ExportOutput]:
    outputs = spec.export_outputs or {DEFAULT_SIGNATURE: PredictOutput(spec.predictions)}
    for name, output in outputs.items():
        if not isinstance(output, ExportOutput):
            raise TypeError(
                explain(
                    f"export_outputs[{name!r}]={output!r} is of type {type(output).__name__}.",
                    expected="a PredictOutput, ClassificationOutput or RegressionOutput.",
                    fix="pass sg.estimator.export.PredictOutput(predictions), for example.",
                )
            )
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
    while True:
        folder = Path(base, f"temp-{number}")
        if not Path(base, str(number)).exists():
            try:
                folder.mkdir()
            except FileExistsError:
                pass
            else:
                return [str(folder), str(number)]
        number += 1


def _fixed_size_error(error: Exception) -> ValueError:
    return ValueError(
        explain(
            f"The model function cannot be exported for arbitrary batch sizes: {error}",
            expected="a model function that does not depend on the batch size.",
            fix="use keras.ops.shape(x) for sizes; or export for one size with "
            "build_raw_serving_input_receiver_fn(features, default_batch_size=n).",
        )
    )
