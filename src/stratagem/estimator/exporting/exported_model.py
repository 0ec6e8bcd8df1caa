"""Exported models: file format, loading and calling."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from stratagem.estimator.exporting.serving import InputSpec
from stratagem.estimator.steps.checkpoints import read_values
from stratagem.messages import explain
from stratagem.optional_libraries import load

VARIABLES_FOLDER = "variables"
_SIGNATURES_FILE = "signatures.json"
_FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Signature:
    """Function of an exported model, with its inputs, outputs and variables by name."""

    inputs: Mapping[str, InputSpec]
    outputs: tuple[str, ...]
    variables: tuple[str, ...]
    exported: jax.export.Exported


def write_signatures(folder: Path, signatures: Mapping[str, Signature], *, as_text: bool) -> None:
    """Writes the functions of an exported model."""
    _load_serialization()
    described: dict[str, Any] = {}
    for number, (name, signature) in enumerate(signatures.items()):
        file = f"function_{number}"
        (folder / f"{file}.jax_export").write_bytes(signature.exported.serialize())
        if as_text:
            (folder / f"{file}.mlir").write_text(signature.exported.mlir_module())
        described[name] = {
            "file": f"{file}.jax_export",
            "inputs": {key: dataclasses.asdict(spec) for key, spec in signature.inputs.items()},
            "outputs": signature.outputs,
            "variables": signature.variables,
        }
    text = json.dumps({"format": _FORMAT, "signatures": described}, indent=1)
    (folder / _SIGNATURES_FILE).write_text(text)


def read_signatures(folder: Path) -> dict[str, Signature]:
    """Reads the functions of an exported model."""
    file = folder / _SIGNATURES_FILE
    if not file.is_file():
        raise ValueError(
            explain(
                f"{folder} contains no exported model.",
                expected="a folder that export_saved_model returned.",
                fix="correct the path; its last component is a number.",
            )
        )
    _load_serialization()
    described = json.loads(file.read_text())
    if described["format"] != _FORMAT:
        raise ValueError(
            explain(
                f"{folder} was exported in format {described['format']}.",
                expected=f"format {_FORMAT}.",
                fix="load it with the version of Stratagem that exported it.",
            )
        )
    return {
        name: Signature(
            inputs={
                key: InputSpec(tuple(spec["shape"]), spec["dtype"])
                for key, spec in one["inputs"].items()
            },
            outputs=tuple(one["outputs"]),
            variables=tuple(one["variables"]),
            exported=jax.export.deserialize(bytearray((folder / one["file"]).read_bytes())),
        )
        for name, one in described["signatures"].items()
    }


def _load_serialization() -> None:
    """Loads the package that JAX serializes exported functions with."""
    load("flatbuffers", needed_by="An exported model", install="'stratagem[export]'")


class _SignatureFunction:
    """Callable signature, bound to the values of its variables."""

    def __init__(self, name: str, signature: Signature, values: list[Any]) -> None:
        self._name = name
        self._signature = signature
        self._values = values
        self._call = jax.jit(signature.exported.call)

    @property
    def inputs(self) -> dict[str, InputSpec]:
        """Inputs by name."""
        return dict(self._signature.inputs)

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the outputs."""
        return self._signature.outputs

    def __call__(self, *args: object, **kwargs: object) -> dict[str, Any]:
        """Calls the function with named inputs, a dict, or a sole input; returns NumPy arrays."""
        values = dict(kwargs)
        if len(args) == 1 and not kwargs:
            sole = next(iter(self.inputs))
            values = dict(args[0]) if isinstance(args[0], Mapping) else {sole: args[0]}
        if set(values) != set(self.inputs) or len(args) > 1:
            raise ValueError(
                explain(
                    f"The signature {self._name!r} was called with {sorted(values)} and "
                    f"{len(args)} positional arguments.",
                    expected=f"the inputs {sorted(self.inputs)} by name.",
                    fix="pass all inputs by name; a sole input may be positional.",
                )
            )
        arrays = {
            name: jnp.asarray(np.asarray(values[name]), spec.dtype)
            for name, spec in self.inputs.items()
        }
        outputs = self._call(self._values, arrays)
        return {name: np.asarray(value) for name, value in outputs.items()}


class ExportedModel(Mapping[str, _SignatureFunction]):
    """Mapping from signature names to callable functions. Created by `load_exported`.

    Args:
        signatures: the functions by name.
        values: the values of all variables by name.

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

    def __init__(self, signatures: Mapping[str, Signature], values: Mapping[str, Any]) -> None:
        on_device = {name: jnp.asarray(value) for name, value in values.items()}
        self._functions = {
            name: _SignatureFunction(name, one, [on_device[variable] for variable in one.variables])
            for name, one in signatures.items()
        }

    def __getitem__(self, name: str) -> _SignatureFunction:
        return self._functions[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._functions)

    def __len__(self) -> int:
        return len(self._functions)

    @property
    def signatures(self) -> Mapping[str, _SignatureFunction]:
        """Functions by signature name."""
        return dict(self._functions)


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
    signatures = read_signatures(folder)
    return ExportedModel(signatures, read_values(str(folder / VARIABLES_FOLDER)))
