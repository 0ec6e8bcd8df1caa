"""Environment variables that are wrong, misspelled or without effect, and imports out of order."""

from __future__ import annotations

import ast
import difflib
import json
import re
from collections.abc import Mapping
from pathlib import Path

from stratagem.cli.doctor.findings import Finding, Level
from stratagem.settings import SETTINGS

_TOPIC = "settings"
_PREFIX = "STRATAGEM_"
_TF_KERAS = "tensorflow.keras"
# Set by launchers for their tasks.
_OF_LAUNCHERS = {
    f"STRATAGEM_{name}"
    for name in (
        "MEMORY_DIR",
        "NODE_HOST",
        "PROGRAM_DIR",
        "REMOTE_JOB",
        "RESTART_COUNT",
        "RUN_DIR",
        "SECRET",
    )
}
# Options of `stratagem launch`.
_OF_OPTIONS = {
    "STRATAGEM_CONFIG",
    *(setting.variable for setting in SETTINGS.values() if not setting.meaning),
}
# The second one is its name since JAX 0.10; JAX refuses both together.
_FRACTIONS = ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION")
_ALLOCATOR = "XLA_PYTHON_CLIENT_ALLOCATOR"
_ALLOCATORS = ("default", "platform", "bfc", "cuda_async", "vmm")
_PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"
_BOOLEANS = ("", "true", "True", "1", "false", "False", "0")
_WITHOUT_EFFECT = {
    "TF_FORCE_GPU_ALLOW_GROWTH": "XLA_PYTHON_CLIENT_PREALLOCATE=false is the setting of JAX",
    "TF_GPU_ALLOCATOR": "XLA_PYTHON_CLIENT_ALLOCATOR is the setting of JAX",
    "TF_XLA_FLAGS": "XLA_FLAGS is the setting of JAX",
}
_SLOW = {
    "NCCL_P2P_DISABLE": "GPUs exchange data through host memory",
    "NCCL_SHM_DISABLE": "processes of one host exchange data through the network",
    "NCCL_IB_DISABLE": "hosts do not use InfiniBand",
    "JAX_DISABLE_JIT": "nothing is compiled",
    "JAX_DEBUG_NANS": "each operation is checked",
}


def check_settings(variables: Mapping[str, str], keras_config: Path | None = None) -> list[Finding]:
    """Checks environment variables.

    Args:
        variables: of the process.
        keras_config: Keras's configuration file; by default `~/.keras/keras.json`.
    """
    findings = [
        *_check_backend(variables, keras_config or Path.home() / ".keras" / "keras.json"),
        *_check_own(variables),
        *_check_memory(variables),
    ]
    for name, instead in _WITHOUT_EFFECT.items():
        if name in variables:
            findings.append(Finding(_TOPIC, Level.NOTE, f"{name} has no effect here: {instead}."))
    for name, effect in _SLOW.items():
        if variables.get(name, "0").lower() not in ("", "0", "false"):
            findings.append(
                Finding(
                    _TOPIC,
                    Level.WARNING,
                    f"{name}={variables[name]} makes training slow: {effect}.",
                    f"unset {name}, unless you are debugging.",
                )
            )
    return findings or [Finding(_TOPIC, Level.OK, "No environment variable is wrong.")]


def check_script(path: Path, backend: str) -> list[Finding]:
    """Checks the imports of a training script.

    Args:
        path: the script.
        backend: backend of Keras if it is imported first, see `keras_backend`.

    Raises:
        OSError: the script cannot be read.
    """
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    except SyntaxError as error:
        return [
            Finding(
                "script", Level.ERROR, f"{path}:{error.lineno}: {error.msg}.", "correct the syntax."
            )
        ]
    lines = _first_imports(tree)
    keras, own = lines.get("keras"), lines.get("stratagem")
    if "tensorflow.keras" in lines and own:
        return [
            Finding(
                "script",
                Level.ERROR,
                f"{path}:{lines['tensorflow.keras']} uses tf.keras, whose models belong to "
                "TensorFlow; strategies train models of keras.",
                f"stratagem migrate {path}",
            )
        ]
    if keras and own and keras < own and backend != "jax":
        return [
            Finding(
                "script",
                Level.ERROR,
                f"{path}:{keras} imports keras before stratagem (line {own}); Keras then loads "
                f"its {backend} backend.",
                "move `import stratagem` above it, or set KERAS_BACKEND=jax.",
            )
        ]
    if not own:
        return [Finding("script", Level.NOTE, f"{path} does not import stratagem.")]
    return [Finding("script", Level.OK, f"{path} imports keras with the jax backend.")]


def keras_backend(variables: Mapping[str, str], keras_config: Path | None = None) -> str:
    """Returns the backend that Keras loads if `stratagem` is not imported before it."""
    return variables.get("KERAS_BACKEND") or _configured_backend(keras_config) or "tensorflow"


def _configured_backend(keras_config: Path | None) -> str | None:
    file = keras_config or Path.home() / ".keras" / "keras.json"
    try:
        return str(json.loads(file.read_text())["backend"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _first_imports(tree: ast.AST) -> dict[str, int]:
    """Returns the first line that imports each package, or uses `tf.keras`."""
    lines: dict[str, int] = {}
    for node in ast.walk(tree):
        names = _imported(node)
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("tf.keras", _TF_KERAS):
            names = [_TF_KERAS]
        for name in names:
            line = getattr(node, "lineno", 0)
            lines[name] = min(lines.get(name, line), line)
    return lines


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        full = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        full = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    else:
        return []
    tops = [name.partition(".")[0] for name in full]
    is_tf_keras = any(f"{name}.".startswith(f"{_TF_KERAS}.") for name in full)
    return [*tops, _TF_KERAS] if is_tf_keras else tops


def _check_backend(variables: Mapping[str, str], keras_config: Path) -> list[Finding]:
    backend = variables.get("KERAS_BACKEND", "")
    if backend and backend != "jax":
        return [
            Finding(
                _TOPIC,
                Level.ERROR,
                f"KERAS_BACKEND={backend}; strategies run on the jax backend only.",
                "unset KERAS_BACKEND, or set KERAS_BACKEND=jax.",
            )
        ]
    configured = _configured_backend(keras_config)
    if not backend and configured not in (None, "jax"):
        return [
            Finding(
                _TOPIC,
                Level.NOTE,
                f"{keras_config} selects the {configured} backend: import stratagem before keras, "
                "which selects jax.",
            )
        ]
    return []


def _check_own(variables: Mapping[str, str]) -> list[Finding]:
    known = {setting.variable: setting for setting in SETTINGS.values() if setting.meaning}
    findings: list[Finding] = []
    for name, text in sorted(variables.items()):
        if not name.startswith(_PREFIX) or name in _OF_LAUNCHERS | _OF_OPTIONS:
            continue
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            meant = f"write {close[0]}" if close else "see docs/reference/environment.md"
            findings.append(
                Finding(_TOPIC, Level.WARNING, f"{name} is not a setting.", f"{meant}.")
            )
            continue
        try:
            known[name].kind.parse(text)
        except ValueError as error:
            findings.append(
                Finding(
                    _TOPIC,
                    Level.ERROR,
                    f"{name}: {str(error).splitlines()[0]}",
                    f"{known[name].meaning} Default: {known[name].default}.",
                )
            )
    return findings


def _check_memory(variables: Mapping[str, str]) -> list[Finding]:
    findings: list[Finding] = []
    given = [name for name in _FRACTIONS if variables.get(name)]
    for name in given:
        text = variables[name]
        value = text if re.fullmatch(r"\d*\.?\d+", text) else "0"
        if not 0 < float(value) < 1:
            findings.append(
                Finding(
                    _TOPIC,
                    Level.ERROR,
                    f"{name}={text} is no fraction of the device's memory.",
                    "set a number above 0 and below 1, or unset it for 0.75.",
                )
            )
    if len(given) > 1:
        findings.append(
            Finding(
                _TOPIC,
                Level.ERROR,
                f"{given[0]} and {given[1]} are both set; JAX stops on a GPU.",
                f"unset {given[0]}, the old name.",
            )
        )
    if (allocator := variables.get(_ALLOCATOR, "default")).lower() not in _ALLOCATORS:
        findings.append(
            Finding(
                _TOPIC,
                Level.ERROR,
                f"{_ALLOCATOR}={allocator} is not an allocator of JAX.",
                f"set one of {', '.join(_ALLOCATORS)}, or unset it.",
            )
        )
    if (text := variables.get(_PREALLOCATE, "")) not in _BOOLEANS:
        findings.append(
            Finding(
                _TOPIC,
                Level.WARNING,
                f"{_PREALLOCATE}={text} counts as true: JAX takes most of the device's memory.",
                f"set {_PREALLOCATE}=false, or unset it.",
            )
        )
    return findings
