"""Environment variables that are wrong, misspelled or without effect."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from stratagem.cli.doctor.findings import Finding, error, note, ok, warning
from stratagem.settings import SETTINGS

# Set by launchers for their tasks, or by options of `stratagem launch`.
_OF_LAUNCHERS = {
    *("STRATAGEM_MEMORY_DIR", "STRATAGEM_NODE_HOST", "STRATAGEM_PROGRAM_DIR"),
    *("STRATAGEM_REMOTE_JOB", "STRATAGEM_RESTART_COUNT", "STRATAGEM_RUN_DIR"),
    "STRATAGEM_SECRET",
    *(setting.variable for setting in SETTINGS.values() if not setting.meaning),
}
# JAX refuses other wrong variables of its memory by itself, as the check of devices shows.
_PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"
_BOOLEANS = ("", "true", "True", "1", "false", "False", "0")
_WITHOUT_EFFECT = {
    "TF_FORCE_GPU_ALLOW_GROWTH": "XLA_PYTHON_CLIENT_PREALLOCATE=false",
    "TF_GPU_ALLOCATOR": "XLA_PYTHON_CLIENT_ALLOCATOR",
    "TF_XLA_FLAGS": "XLA_FLAGS",
}
_SLOW = {
    "NCCL_P2P_DISABLE": "GPUs exchange data through host memory",
    "NCCL_SHM_DISABLE": "processes of one host exchange data through the network",
    "NCCL_IB_DISABLE": "hosts do not use InfiniBand",
    "JAX_DISABLE_JIT": "nothing is compiled",
    "JAX_DEBUG_NANS": "each operation is checked",
}


def check_settings(
    variables: Mapping[str, str], keras_config: Path | None = None
) -> Iterator[Finding]:
    """Checks environment variables, and Keras's configuration, by default `~/.keras/keras.json`."""
    findings = [*_check_backend(variables, keras_config), *_check_own(variables)]
    if (text := variables.get(_PREALLOCATE, "")) not in _BOOLEANS:
        findings.append(
            warning(
                f"{_PREALLOCATE}={text} counts as true: JAX takes most of the device's memory.",
                f"set {_PREALLOCATE}=false, or unset it.",
            )
        )
    for name, instead in _WITHOUT_EFFECT.items():
        if name in variables:
            findings.append(note(f"{name} has no effect here: {instead} is the setting of JAX."))
    for name, effect in _SLOW.items():
        if variables.get(name, "0").lower() not in ("", "0", "false"):
            text = f"{name}={variables[name]} makes training slow: {effect}."
            findings.append(warning(text, f"unset {name}, unless you are debugging."))
    yield from findings or [ok("No environment variable is wrong.")]


def _configured(keras_config: Path | None) -> tuple[Path, str | None]:
    """Returns Keras's configuration file, and the backend that it selects."""
    file = keras_config or Path.home() / ".keras" / "keras.json"
    try:
        return file, str(json.loads(file.read_text())["backend"])
    except (OSError, ValueError, TypeError, KeyError):
        return file, None


def _check_backend(variables: Mapping[str, str], keras_config: Path | None) -> Iterator[Finding]:
    backend, (file, configured) = variables.get("KERAS_BACKEND", ""), _configured(keras_config)
    if backend and backend != "jax":
        yield error(
            f"KERAS_BACKEND={backend}; strategies run on the jax backend only.",
            "unset KERAS_BACKEND, or set KERAS_BACKEND=jax.",
        )
    elif not backend and configured not in (None, "jax"):
        yield note(
            f"{file} selects the {configured} backend: import stratagem before keras, which "
            "selects jax."
        )


def _check_own(variables: Mapping[str, str]) -> Iterator[Finding]:
    known = {setting.variable: setting for setting in SETTINGS.values() if setting.meaning}
    for name, text in sorted(variables.items()):
        if not name.startswith("STRATAGEM_") or name in _OF_LAUNCHERS:
            continue
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            meant = f"write {close[0]}" if close else "see docs/reference/environment.md"
            yield warning(f"{name} is not a setting.", f"{meant}.")
            continue
        try:
            known[name].kind.parse(text)
        except ValueError as wrong:
            fix = f"{known[name].meaning} Default: {known[name].default}."
            yield error(f"{name}: {str(wrong).splitlines()[0]}", fix)
