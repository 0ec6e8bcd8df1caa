"""Exported models: how they lie in a folder, and how they are called."""

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

__all__ = [
    "ExportedModel",
    "Signature",
    "load_exported",
    "read_signatures",
    "write_signatures",
]

VARIABLES_FOLDER = "variables"
_SIGNATURES_FILE = "signatures.json"
_FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Signature:
    """One function of an exported model.

    Args:
        inputs: by name.
        outputs: names.
        variables: names of the variables that it takes first, in this order.
        exported: the function: of a list of values of these, and a dict of inputs; it returns a
            dict of outputs.
    """

    inputs: Mapping[str, InputSpec]
    outputs: tuple[str, ...]
    variables: tuple[str, ...]
    exported: jax.export.Exported


def write_signatures(folder: Path, signatures: Mapping[str, Signature], *, as_text: bool) -> None:
    """Writes the functions of an exported model.

    Args:
        folder: of the model; it exists.
        signatures: by name.
        as_text: whether to write their programs for people, too.
    """
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
    """Reads the functions of an exported model.

    Args:
        folder: of the model.

    Returns:
        The signatures by name.

    Raises:
        ValueError: the folder holds no exported model, or one of a later version.
    """
    file = folder / _SIGNATURES_FILE
    if not file.is_file():
        raise ValueError(
            explain(
                f"{folder} holds no exported model.",
                expected="a folder that export_saved_model returned.",
                fix="correct the path: it ends with a number.",
            )
        )
    _load_serialization()
    described = json.loads(file.read_text())
    if described["format"] != _FORMAT:
        raise ValueError(
            explain(
                f"{folder} was exported in format {described['format']}.",
                expected=f"format {_FORMAT}, the one that is known here.",
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
    """JAX writes and reads exported functions by it."""
    load("flatbuffers", needed_by="An exported model", install="'stratagem[export]'")


class _Callable:
    """A signature with the values of its variables."""

    def __init__(self, name: str, signature: Signature, values: list[Any]) -> None:
        self._name = name
        self._signature = signature
        self._values = values
        self._call = jax.jit(signature.exported.call)

    @property
    def inputs(self) -> dict[str, InputSpec]:
        """The inputs by name."""
        return dict(self._signature.inputs)

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of the outputs."""
        return self._signature.outputs

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Calls the function.

        Args:
            *args: the input, where there is only one; or a dict of all.
            **kwargs: inputs by name.

        Returns:
            NumPy arrays by the name of the output.
        """
        given = dict(kwargs)
        if len(args) == 1 and not kwargs:
            sole = next(iter(self.inputs))
            given = dict(args[0]) if isinstance(args[0], Mapping) else {sole: args[0]}
        if set(given) != set(self.inputs) or len(args) > 1:
            raise ValueError(
                explain(
                    f"The signature {self._name!r} was called with {sorted(given)} and "
                    f"{len(args)} arguments without names.",
                    expected=f"the inputs {sorted(self.inputs)}, by name.",
                    fix="pass them all by name, or one alone without.",
                )
            )
        arrays = {
            name: jnp.asarray(np.asarray(given[name]), spec.dtype)
            for name, spec in self.inputs.items()
        }
        outputs = self._call(self._values, arrays)
        return {name: np.asarray(value) for name, value in outputs.items()}


class ExportedModel(Mapping[str, _Callable]):
    """An exported model: its functions by signature. Made by `load_exported`.

    Args:
        signatures: by name.
        values: of all variables, by name.
    """

    def __init__(self, signatures: Mapping[str, Signature], values: Mapping[str, Any]) -> None:
        on_device = {name: jnp.asarray(value) for name, value in values.items()}
        self._functions = {
            name: _Callable(name, one, [on_device[variable] for variable in one.variables])
            for name, one in signatures.items()
        }

    def __getitem__(self, name: str) -> _Callable:
        return self._functions[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._functions)

    def __len__(self) -> int:
        return len(self._functions)

    @property
    def signatures(self) -> Mapping[str, _Callable]:
        """The functions by signature."""
        return dict(self._functions)


def load_exported(path: str | os.PathLike[str]) -> ExportedModel:
    """Loads what `Estimator.export_saved_model` has written; the model function is not needed.

    Args:
        path: the folder that it returned.

    Returns:
        The functions by signature: each takes arrays by name, in batches of any size unless the
        export says otherwise, and returns a dict of arrays.

    Raises:
        ValueError: the folder holds no exported model.

    Example::

        model = sg.estimator.load_exported("exports/1700000000")
        scores = model["serving_default"](x=features)["scores"]

    Source: TF 2.21 saved_model/load.py, load.
    """
    folder = Path(os.fspath(path))
    signatures = read_signatures(folder)
    return ExportedModel(signatures, read_values(str(folder / VARIABLES_FOLDER)))
