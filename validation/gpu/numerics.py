"""Precision of matrix products and convolutions on the GPU, and equality of repeated runs."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from typing import Any

import numpy as np

from validation.gpu.checks import check, device, is_on_cpu
from validation.gpu.models import train, weights_of

_DETERMINISTIC = "--xla_gpu_deterministic_ops=true"


@check(priority=2)
def precision() -> dict[str, Any]:
    """Relative errors against float64 of NumPy, by `jax_default_matmul_precision` and dtype."""
    import jax
    import jax.numpy as jnp

    size = 256 if is_on_cpu() else 2048
    draw = np.random.default_rng(0)
    a, b = (draw.standard_normal((size, size)) for _ in range(2))
    image, kernel = draw.standard_normal((8, 32, 32, 16)), draw.standard_normal((3, 3, 16, 32))
    product = a.astype("float32").astype("float64") @ b.astype("float32").astype("float64")
    convolved = _convolved(image.astype("float32"), kernel.astype("float32"))
    one = jax.devices("cpu" if is_on_cpu() else "gpu")[0]
    figures: dict[str, Any] = {}
    settings = (
        ("default", None, "float32"),
        ("highest", "highest", "float32"),
        ("tensorfloat32", "tensorfloat32", "float32"),
        ("bfloat16 operands", None, "bfloat16"),
        ("float16 operands", None, "float16"),
    )
    for name, setting, dtype in settings:
        with jax.default_matmul_precision(setting) if setting else jax.default_device(one):
            left, right, images, kernels = (
                jax.device_put(jnp.asarray(value, dtype), one) for value in (a, b, image, kernel)
            )
            dot = jax.jit(lambda x, y: jnp.dot(x, y, preferred_element_type=jnp.float32))
            conv = jax.jit(
                lambda x, y: jax.lax.conv_general_dilated(
                    x, y, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
                )
            )
            found = np.asarray(dot(left, right), np.float64)
            of_conv = np.asarray(conv(images, kernels).astype("float32"), np.float64)
        figures[name] = {
            "matmul": float(np.abs(found - product).max() / np.abs(product).max()),
            "matmul_rms": float(_rms(found - product) / _rms(product)),
            "conv": float(np.abs(of_conv - convolved).max() / np.abs(convolved).max()),
        }
    assert figures["highest"]["matmul_rms"] < 2e-6, figures
    assert figures["highest"]["conv"] < 1e-5, figures
    assert figures["default"]["matmul_rms"] < 2e-3, figures
    assert figures["bfloat16 operands"]["matmul_rms"] < 2e-2, figures
    return figures


def _rms(values: np.ndarray[Any, Any]) -> float:
    return float(np.sqrt(np.mean(np.square(values))))


def _convolved(image: np.ndarray[Any, Any], kernel: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    padded = np.pad(image.astype("float64"), ((0, 0), (1, 1), (1, 1), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(1, 2))
    return np.einsum("nhwcij,ijco->nhwo", windows, kernel.astype("float64"), optimize=True)


@check(priority=2)
def default_precision_in_training() -> dict[str, Any]:
    """TF32, the default: the MLP's weights after eight steps, beside those of exact products."""
    import jax

    import stratagem as sg

    figures: dict[str, Any] = {}
    for kind in ("mlp", "conv"):
        found = {}
        for setting in (None, "highest"):
            jax.config.update("jax_default_matmul_precision", setting)
            model = train(sg.MirroredStrategy([device()]), kind)
            found[setting] = (weights_of(model), model.losses_of_fit)
        pairs = zip(found[None][0], found["highest"][0], strict=True)
        figures[kind] = {
            "weights": max(float(np.abs(one - two).max()) for one, two in pairs),
            "losses": [found[None][1], found["highest"][1]],
        }
        assert figures[kind]["weights"] < 2e-2, figures
    return figures


@check(priority=2)
def determinism_by_default() -> dict[str, Any]:
    """Whether repeated runs are equal is measured, not required."""
    return _repeated("")


@check(priority=1)
def determinism_with_flag() -> dict[str, Any]:
    figures = _repeated(_DETERMINISTIC)
    for kind, found in figures.items():
        if isinstance(found, dict):
            assert found["same process"], figures
            assert found["other process"], (kind, figures)
    return figures


def _repeated(flag: str) -> dict[str, Any]:
    """Trains twice in each of two processes; compares the weights bit by bit."""
    flags = " ".join(filter(None, [os.environ.get("XLA_FLAGS", ""), "" if is_on_cpu() else flag]))
    command = [
        sys.executable,
        "-c",
        "from validation.gpu import numerics; numerics.print_digests()",
    ]
    started = [
        subprocess.Popen(
            command,
            env={**os.environ, "XLA_FLAGS": flags},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    printed = [process.communicate(timeout=90) for process in started]
    for process, (_, errors) in zip(started, printed, strict=True):
        assert process.returncode == 0, errors[-4000:]
    first, second = (json.loads(output.splitlines()[-1]) for output, _ in printed)
    return {
        "flags": flags,
        **{
            kind: {
                "same process": len({*first[kind]}) == 1 and len({*second[kind]}) == 1,
                "other process": first[kind][0] == second[kind][0],
            }
            for kind in first
        },
    }


def print_digests() -> None:
    """Trains twice, and prints digests of the weights: what a process of `_repeated` does."""
    import jax
    import jax.numpy as jnp

    import stratagem as sg

    digests: dict[str, list[str]] = {}
    for kind in ("mlp", "conv", "table"):
        for _ in range(2):
            model = train(sg.MirroredStrategy([device()]), kind)
            digests.setdefault(kind, []).append(_digest(weights_of(model)))
    draw = np.random.default_rng(1)
    ids = draw.integers(0, 50, 200_000)
    rows = draw.standard_normal((200_000, 16)).astype("float32")
    one = jax.devices("cpu" if is_on_cpu() else "gpu")[0]
    added = jax.jit(lambda i, r: jnp.zeros((50, 16)).at[i].add(r))
    ids, rows = jax.device_put(ids, one), jax.device_put(rows, one)
    digests["scatter_add"] = [_digest([np.asarray(added(ids, rows))]) for _ in range(5)]
    print(json.dumps(digests))


def _digest(arrays: list[np.ndarray[Any, Any]]) -> str:
    joined = b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)
    return hashlib.sha256(joined).hexdigest()
