"""Export of an Estimator: the prediction of its model function as programs for any batch size."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp

from stratagem.checkpoint import Checkpoint
from stratagem.checkpoint.group_calls import run_on_first
from stratagem.collectives import SoleCommunicator
from stratagem.context import ReplicaBatch, ReplicaContext, stack
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
from stratagem.execution import ReplicaScope
from stratagem.execution.tracing.created_variables import initialize_created_variables
from stratagem.messages import explain

__all__ = ["check_receiver", "make_variables", "signatures_of", "write_export"]

_PLATFORMS = ("cpu", "cuda", "tpu")
_ASSETS_FOLDER = "assets.extra"


def check_receiver(function: Any) -> ServingInputReceiver:
    """Returns what a `serving_input_receiver_fn` gives.

    Args:
        function: the function.

    Raises:
        TypeError: it cannot be called, or gives something else.
    """
    receiver = function() if callable(function) else function
    if not callable(function) or not isinstance(receiver, ServingInputReceiver):
        raise TypeError(
            explain(
                f"serving_input_receiver_fn={function!r} gives {receiver!r}.",
                expected="a function that returns an sg.estimator.export.ServingInputReceiver.",
                fix="pass sg.estimator.export.build_raw_serving_input_receiver_fn(features).",
            )
        )
    return receiver


def make_variables(step: ModelStep, receiver: ServingInputReceiver) -> EstimatorSpec:
    """Calls the model function once, which makes the variables that it predicts with.

    Args:
        step: of prediction.
        receiver: the inputs.

    Returns:
        What the model function returned.

    Raises:
        ValueError: the model function cannot be traced for any size of a batch.
    """
    jax.eval_shape(_Serving(step, receiver).outputs, [], _shapes(receiver))
    initialize_created_variables(step.strategy)
    assert step.spec is not None
    return step.spec


def signatures_of(step: ModelStep, receiver: ServingInputReceiver) -> dict[str, Signature]:
    """Returns the functions to export.

    Args:
        step: of prediction, whose variables exist.
        receiver: the inputs.

    """
    named = step.store.named
    values = [jax.ShapeDtypeStruct(variable.shape, variable.dtype) for variable in named.values()]
    assert step.spec is not None
    signatures: dict[str, Signature] = {}
    for name, output in _outputs_of(step.spec).items():
        serving = _Serving(step, receiver, name)
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
    """Writes an export under a folder of its own. Call on every process; process 0 writes.

    Args:
        base: the folder of all exports.
        step: of prediction, whose variables have their values.
        signatures: its functions.
        assets: files to copy, by their paths in the export.
        as_text: whether to write the programs for people, too.

    Returns:
        The new folder, whose name is the time in seconds; it is there when it is whole.
    """
    folder, name = run_on_first("export_saved_model", lambda: _begin(base))
    Checkpoint(**{VARIABLES: step.store.named}).write(os.path.join(folder, VARIABLES_FOLDER))

    def finish() -> str:
        write_signatures(Path(folder), signatures, as_text=as_text)
        for target, source in assets.items():
            place = Path(folder, _ASSETS_FOLDER, target)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, place)
        final = Path(base, name)
        Path(folder).rename(final)
        return str(final)

    return run_on_first("export_saved_model", finish)


class _Serving:
    """The prediction as a pure function of the values of variables and of inputs.

    Args:
        step: of prediction.
        receiver: the inputs.
        signature: which outputs; None for no particular ones.
    """

    def __init__(
        self, step: ModelStep, receiver: ServingInputReceiver, signature: str | None = None
    ) -> None:
        self._step = step
        self._receiver = receiver
        self._signature = signature

    def outputs(self, values: list[Any], inputs: dict[str, Any]) -> dict[str, Any]:
        step = self._step
        variables = step.store.named.values() if values else ()
        of_variable = {id(one): value for one, value in zip(variables, values, strict=True)}
        context = ReplicaContext(step.strategy, 0, SoleCommunicator(), ReplicaBatch())
        frame = stack.push(stack.FrameKind.REPLICA, step.strategy, context)
        with frame, ReplicaScope(lambda variable: of_variable.get(id(variable))):
            features = self._receiver.features_of(inputs)
            try:
                spec = step.call(features, None).spec
            except Exception as error:
                if not self._takes_any_size:
                    raise
                raise _not_for_any_size(error) from error
        outputs = _outputs_of(spec)
        chosen = (
            next(iter(outputs.values())) if self._signature is None else outputs[self._signature]
        )
        return {name: jnp.asarray(value) for name, value in chosen.outputs.items()}

    @property
    def _takes_any_size(self) -> bool:
        return any(None in spec.shape for spec in self._receiver.inputs.values())


def _outputs_of(spec: EstimatorSpec) -> dict[str, ExportOutput]:
    given = spec.export_outputs
    outputs: dict[str, Any] = (
        dict(given) if given else {DEFAULT_SIGNATURE: PredictOutput(spec.predictions)}
    )
    for name, output in outputs.items():
        if not isinstance(output, ExportOutput):
            raise TypeError(
                explain(
                    f"export_outputs[{name!r}]={output!r} is of type {type(output).__name__}.",
                    expected="a PredictOutput, ClassificationOutput or RegressionOutput.",
                    fix="pass sg.estimator.export.PredictOutput(predictions), for example.",
                )
            )
    return outputs


def _shapes(receiver: ServingInputReceiver) -> dict[str, jax.ShapeDtypeStruct]:
    """The inputs with symbols for sizes that are not known; all batches are of one size."""
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


def _begin(base: str) -> list[str]:
    """Makes the folder that an export is written in, and chooses its name."""
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


def _not_for_any_size(error: Exception) -> ValueError:
    return ValueError(
        explain(
            f"The model function cannot be exported for batches of any size: {error}",
            expected="a model function that predicts for batches of every size.",
            fix="use keras.ops.shape(x) for sizes; or export for one size with "
            "build_raw_serving_input_receiver_fn(features, default_batch_size=n).",
        )
    )
