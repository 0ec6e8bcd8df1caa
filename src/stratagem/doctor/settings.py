"""Environment variables that are wrong, misspelled or without effect, and imports out of order."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import json
import re
from collections.abc import Mapping
from pathlib import Path

from stratagem import environment
from stratagem.doctor.finding import Finding, Level
from stratagem.launch import LaunchOptions

__all__ = ["check_script", "check_settings"]

_TOPIC = "settings"
_PREFIX = "STRATAGEM_"
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
    )
}
# Options of `stratagem launch`.
_OF_OPTIONS = {
    "STRATAGEM_CONFIG",
    *(f"STRATAGEM_{field.name.upper()}" for field in dataclasses.fields(LaunchOptions)),
}
_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
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


def check_script(path: Path) -> list[Finding]:
    """Checks the order of imports of a training script.

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
    lines = {"keras": 0, "stratagem": 0, "tensorflow": 0}
    for node in ast.walk(tree):
        for name in _imported(node):
            if name in lines and isinstance(node, ast.Import | ast.ImportFrom):
                lines[name] = min(lines[name] or node.lineno, node.lineno)
    if lines["keras"] and lines["keras"] < (lines["stratagem"] or lines["keras"]):
        return [
            Finding(
                "script",
                Level.ERROR,
                f"{path}:{lines['keras']} imports keras before stratagem (line "
                f"{lines['stratagem']}), so that Keras may load another backend than JAX.",
                "move `import stratagem` above it, or set KERAS_BACKEND=jax.",
            )
        ]
    if not lines["stratagem"]:
        return [Finding("script", Level.NOTE, f"{path} does not import stratagem.")]
    return [Finding("script", Level.OK, f"{path} imports stratagem first.")]


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name.partition(".")[0] for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return [node.module.partition(".")[0]]
    return []


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
    try:
        configured = json.loads(keras_config.read_text()).get("backend", "jax")
    except (OSError, ValueError, AttributeError):
        return []
    if not backend and configured != "jax":
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
    known = {variable.name: variable for variable in environment.VARIABLES.values()}
    findings: list[Finding] = []
    for name, text in sorted(variables.items()):
        if not name.startswith(_PREFIX) or name in _OF_LAUNCHERS | (_OF_OPTIONS - known.keys()):
            continue
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            meant = f"write {close[0]}" if close else "see docs/reference/environment.md"
            findings.append(
                Finding(_TOPIC, Level.WARNING, f"{name} is not a setting.", f"{meant}.")
            )
            continue
        try:
            known[name].parse(text)
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
    text = variables.get(_FRACTION)
    if text is None:
        return []
    value = text if re.fullmatch(r"\d*\.?\d+", text) else "0"
    if 0 < float(value) < 1:
        return []
    return [
        Finding(
            _TOPIC,
            Level.ERROR,
            f"{_FRACTION}={text} is no fraction of the device's memory.",
            "set a number above 0 and below 1, or unset it for 0.75.",
        )
    ]
