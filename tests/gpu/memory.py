"""A GPU without free memory, and variables that are larger than the GPU's memory."""

from __future__ import annotations

import gc
import os
import resource
import time
from typing import Any

import numpy as np

from tests.gpu.checks import check, device, is_on_cpu

_GIB = 2**30


def _used_bytes() -> int:
    import jax

    gc.collect()
    stats = jax.devices("cpu" if is_on_cpu() else "gpu")[0].memory_stats() or {}
    return int(stats.get("bytes_in_use", 0))


@check(priority=0, XLA_PYTHON_CLIENT_MEM_FRACTION="0.06")
def out_of_memory() -> dict[str, Any]:
    """Each way to run out of memory: our error, kept variables, no held memory, a smaller batch."""
    import jax
    import jax.numpy as jnp
    import keras

    import stratagem as sg

    strategy = sg.OneDeviceStrategy(device())
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((64,)), keras.layers.Dense(16384, "relu"), keras.layers.Dense(1024)]
        )
        model.compile("adam", "mse")
    small, target = np.ones((64, 64), "float32"), np.ones((64, 1024), "float32")
    model.fit(small, target, verbose=0)
    figures: dict[str, Any] = {"bytes_before": _used_bytes()}

    def huge() -> Any:
        kernel = model.trainable_variables[0]
        kernel.assign(kernel.value + 1)  # donated
        size = 2**47 if is_on_cpu() else 2**34
        return jnp.sort(jnp.ones((size // 4,)) * kernel.value[0, 0])

    def wait_for_run() -> None:
        result = strategy.run(huge)
        figures["run returned before its error"] = True
        with strategy.scope():
            jax.block_until_ready(result)

    def make_variable() -> None:
        with strategy.scope():
            value = keras.Variable(np.zeros((2**15, 2**17), "float32"))  # 16 GiB
            jax.block_until_ready(value.value)

    def read_input() -> None:
        batches = strategy.distribute_dataset([np.zeros((2**16, 2**16), "float32")])
        jax.block_until_ready(next(iter(batches)))

    large = np.ones((2**18, 64), "float32"), np.zeros((2**18, 1024), "float32")
    ways: dict[str, Any] = {"run": wait_for_run}
    if not is_on_cpu():
        ways = {
            "fit": lambda: model.fit(*large, batch_size=2**18, verbose=0),
            "evaluate": lambda: model.evaluate(*large, batch_size=2**18, verbose=0),
            "predict": lambda: model.predict(large[0], batch_size=2**18, verbose=0),
            "variable": make_variable,
            "input": read_input,
            **ways,
        }
    problems: list[str] = []
    for name, way in ways.items():
        before = [np.asarray(weight) for weight in model.get_weights()]
        try:
            way()
            problems.append(f"{name}: no error")
        except sg.errors.ResourceExhaustedError as error:
            figures[name] = {"message": str(error), "cause": repr(error.__cause__)[:1500]}
        except Exception as error:  # noqa: BLE001 - a result
            figures[name] = {"other": f"{type(error).__name__}: {error}"[:3000]}
            problems.append(f"{name}: {type(error).__name__}")
        entry = figures.setdefault(name, {})
        entry["bytes_after"] = _used_bytes()
        try:
            after = [np.asarray(weight) for weight in model.get_weights()]
            entry["weights kept"] = all(map(np.array_equal, before, after))
            history = model.fit(small, target, verbose=0)
            entry["smaller batch works"] = bool(np.isfinite(history.history["loss"][0]))
        except Exception as error:  # noqa: BLE001 - a result
            entry["afterwards"] = f"{type(error).__name__}: {error}"[:1500]
            if "lost their values" not in entry.get("message", ""):
                problems.append(f"{name}: unusable afterwards without a word")
            with strategy.scope():  # go on with another model, as the error says
                model = keras.Sequential(
                    [
                        keras.Input((64,)),
                        keras.layers.Dense(16384, "relu"),
                        keras.layers.Dense(1024),
                    ]
                )
                model.compile("adam", "mse")
            model.fit(small, target, verbose=0)
        grown = entry["bytes_after"] - figures["bytes_before"]
        if grown > 64 * 2**20:
            problems.append(f"{name}: {grown} bytes are held")
    assert not problems, (problems, figures)
    return figures


@check(priority=2)
def pinned_state() -> dict[str, Any]:
    """A few large variables in pinned memory: values of NumPy, and the speed of a step."""
    return _train_pinned(4, 64 if is_on_cpu() else 8192, num_steps=3)


@check(priority=8, timeout_s=200, is_alone=True, XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB="112")
def pinned_more_than_the_gpu() -> dict[str, Any]:
    """Blocks of 1 GiB in pinned memory, more than the GPU has; each step trains a few of them.

    STRATAGEM_GPU_PINNED_GIB sets their number. It is lowered if pinning takes too long.
    """
    wanted = int(os.environ.get("STRATAGEM_GPU_PINNED_GIB", "2" if is_on_cpu() else "88"))
    side = 64 if is_on_cpu() else 16384
    return _train_pinned(wanted, side, num_steps=2, create_limit_s=60)


def _train_pinned(
    num_blocks: int, side: int, num_steps: int, create_limit_s: float = 1e9
) -> dict[str, Any]:
    """Trains `tanh(x W)` of some blocks by SGD; checks the new values against NumPy."""
    import jax
    import jax.numpy as jnp
    import keras

    import stratagem as sg

    jax.config.update("jax_default_matmul_precision", "highest")
    strategy = sg.CentralStorageStrategy([device()], "pinned_host")
    figures: dict[str, Any] = {"block_bytes": side * side * 4, "create_s": []}
    begin_s = time.monotonic()
    blocks: list[Any] = []
    with strategy.scope():
        for index in range(num_blocks):
            one_s = time.monotonic()
            blocks.append(keras.Variable(np.full((side, side), 1e-3, "float32"), name=f"w{index}"))
            jax.block_until_ready(blocks[-1].stored)
            figures["create_s"].append(round(time.monotonic() - one_s, 3))
            if time.monotonic() - begin_s > create_limit_s:
                break
    figures |= {"blocks": len(blocks), "all_s": time.monotonic() - begin_s}
    figures["bytes"] = len(blocks) * side * side * 4
    figures["memory_kinds"] = sorted({str(one.stored.sharding.memory_kind) for one in blocks})
    x = np.random.default_rng(0).standard_normal((32, side)).astype("float32")

    def train_some(*some: Any) -> Any:
        def step(batch: Any) -> Any:
            def loss() -> Any:
                return sum(jnp.mean(jnp.tanh(batch @ one.value) * batch) for one in some)

            value, gradients = sg.value_and_grad(loss, list(some))
            for one, gradient in zip(some, gradients, strict=True):
                one.assign(one.value - 0.5 * gradient)
            return value

        return step

    touched = {0, len(blocks) // 2, len(blocks) - 1}
    figures["step_s"], figures["loss"] = {}, {}
    for index in sorted(touched):
        step = train_some(blocks[index])
        times: list[float] = []
        for _ in range(num_steps):
            one_s = time.monotonic()
            value = float(strategy.run(step, args=(x,)))
            jax.block_until_ready(blocks[index].stored)
            times.append(round(time.monotonic() - one_s, 4))
        figures["step_s"][index], figures["loss"][index] = times, value
    best_s = min(min(times) for times in figures["step_s"].values())
    figures["moved_bytes_per_s"] = 2 * side * side * 4 / best_s
    stats = jax.devices("cpu" if is_on_cpu() else "gpu")[0].memory_stats() or {}
    figures["gpu_peak_bytes"] = stats.get("peak_bytes_in_use")
    figures["gpu_limit_bytes"] = stats.get("bytes_limit")
    # All columns of a constant block are equal to each other, so that few of them suffice.
    columns = np.arange(0, side, max(1, side // 8))
    expected = np.full((side, len(columns)), 1e-3)
    wide = x.astype("float64")
    for _ in range(num_steps):
        slope = 1 - np.tanh(wide @ expected) ** 2
        expected -= 0.5 * (wide.T @ (slope * wide[:, columns])) / (32 * side)
    figures["error"] = {}
    for index in range(len(blocks)):
        if index in touched:
            found = _columns(blocks[index], columns)
            figures["error"][index] = float(np.abs(found - expected).max())
        elif index % 16 == 1:
            assert (_columns(blocks[index], columns) == np.float32(1e-3)).all(), index
    assert max(figures["error"].values()) < 1e-6, figures
    assert np.abs(expected - 1e-3).max() > 1e-6, figures
    return figures


def _columns(block: Any, columns: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.asarray(block.stored)[:, columns]


@check(priority=9, timeout_s=240, is_alone=True)
def table_larger_than_the_gpu() -> dict[str, Any]:
    """An embedding table in host memory, larger than the GPU's: rows are trained on the GPU.

    STRATAGEM_GPU_TABLE_GIB sets its size. A small one comes first: the large one follows only if
    training copied no table, so that the machine's memory is enough.
    """
    small = _train_table(16 * 2**20 if is_on_cpu() else 4 * _GIB)
    figures: dict[str, Any] = {"small": small}
    wanted = int(os.environ.get("STRATAGEM_GPU_TABLE_GIB", "0" if is_on_cpu() else "88")) * _GIB
    available = _available_bytes()
    wanted = min(wanted, int(0.85 * available))
    figures |= {"wanted_bytes": wanted, "available_bytes": available}
    if small["host_bytes"] > 1.3 * small["table_bytes"] + 2 * _GIB:
        raise AssertionError(f"training copies the table: {figures}")
    if wanted > small["table_bytes"]:
        figures["large"] = _train_table(wanted)
    return figures


def _available_bytes() -> int:
    with open("/proc/meminfo", encoding="ascii") as lines:
        numbers = dict(line.split(":") for line in lines)
    available = int(numbers["MemAvailable"].split()[0]) * 1024
    try:
        with open("/sys/fs/cgroup/memory.max", encoding="ascii") as limit:
            available = min(available, int(limit.read()))
    except (OSError, ValueError):
        pass
    return available


def _train_table(num_bytes: int) -> dict[str, Any]:
    import jax
    import keras

    import stratagem as sg

    width = 128
    num_rows = num_bytes // (4 * width)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    strategy = sg.CentralStorageStrategy([device()], "pinned_host")
    begin_s = time.monotonic()
    with strategy.scope():
        table = keras.layers.Embedding(
            num_rows, width, embeddings_initializer="zeros", name="table"
        )
        model = keras.Sequential(
            [keras.Input((8,), dtype="int32"), table, keras.layers.Flatten(), keras.layers.Dense(1)]
        )
        model.compile(keras.optimizers.SGD(1.0), "mse")
    value = table.embeddings.stored
    jax.block_until_ready(value)
    figures: dict[str, Any] = {
        "table_bytes": num_rows * width * 4,
        "rows": num_rows,
        "on": str(value.sharding),
        "create_s": time.monotonic() - begin_s,
    }
    draw = np.random.default_rng(5)
    ids = draw.integers(0, num_rows, (256, 8)).astype("int32")
    ids[0], ids[1] = num_rows - 1, 0
    target = np.ones((256, 1), "float32")
    kernel, bias = (np.asarray(weight, np.float64) for weight in model.layers[-1].get_weights())
    times = []
    for _ in range(3):
        one_s = time.monotonic()
        model.train_on_batch(ids, target)
        times.append(time.monotonic() - one_s)
    figures["step_s"] = times
    # NumPy: rows start at zero, and only these change.
    used, places = np.unique(ids, return_inverse=True)
    places = places.reshape(ids.shape)
    rows = np.zeros((len(used), width))
    for _ in range(3):
        flat = rows[places].reshape(256, -1)
        slope = 2 * (flat @ kernel + bias - 1) / 256
        of_rows = (slope @ kernel.T).reshape(256, 8, width)
        kernel, bias = kernel - flat.T @ slope, bias - slope.sum(0)
        np.add.at(rows, places, -of_rows)
    found = np.asarray(table.embeddings.rows_outside(used), np.float64)
    figures["error"] = float(np.abs(found - rows).max())
    figures["changed"] = float(np.abs(rows).max())
    others = np.setdiff1d(draw.integers(0, num_rows, 1000), used)
    assert not np.asarray(table.embeddings.rows_outside(others)).any(), figures
    assert figures["changed"] > 1e-3, figures
    assert figures["error"] < 2e-3 * figures["changed"] + 1e-6, figures
    figures["host_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    stats = jax.devices("cpu" if is_on_cpu() else "gpu")[0].memory_stats() or {}
    figures["gpu_peak_bytes"] = stats.get("peak_bytes_in_use")
    return figures
