"""A GPU without free memory, and variables that are larger than the GPU's memory."""

from __future__ import annotations

import gc
import os
import resource
import time
from typing import Any

import numpy as np

from validation.gpu.checks import check, device, is_on_cpu

_GIB = 2**30


def _used_bytes() -> int:
    import jax

    gc.collect()
    stats = jax.devices("cpu" if is_on_cpu() else "gpu")[0].memory_stats() or {}
    return int(stats.get("bytes_in_use", 0))


class _Trial:
    """A model on a device with little memory, and ways to need more than that."""

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        self._small = np.ones((64, 64), "float32"), np.ones((64, 1024), "float32")
        self._large = np.ones((2**18, 64), "float32"), np.zeros((2**18, 1024), "float32")
        self.late: list[str] = []  # ways whose error came with the result, not with the call
        self.renew()

    def renew(self) -> None:
        """Makes and trains a new model."""
        import keras

        with self._strategy.scope():
            self.model = keras.Sequential(
                [keras.Input((64,)), keras.layers.Dense(16384, "relu"), keras.layers.Dense(1024)]
            )
            self.model.compile("adam", "mse")
        self.train_little()

    def train_little(self) -> float:
        return self.model.fit(*self._small, verbose=0).history["loss"][0]

    def ways(self) -> dict[str, Any]:
        """The ways by name; on CPU, whose memory is large, only one."""
        if is_on_cpu():
            return {"run": self._run}
        options: dict[str, Any] = {"batch_size": 2**18, "verbose": 0}
        return {
            "fit": lambda: self.model.fit(*self._large, **options),
            "fit, a later step": lambda: self.model.fit(self._growing(), steps_per_epoch=9),
            "evaluate": lambda: self.model.evaluate(*self._large, **options),
            "predict": lambda: self.model.predict(self._large[0], **options),
            "variable": self._make_variable,
            "input": self._read_input,
            "run": self._run,
        }

    def _growing(self) -> Any:
        """Yields batches as before, and then one that is too large."""
        for _ in range(8):
            yield self._small
        yield self._large

    def _run(self) -> None:
        import jax
        import jax.numpy as jnp

        def huge() -> Any:
            kernel = self.model.trainable_variables[0]
            kernel.assign(kernel.value + 1)  # donated
            size = 2**47 if is_on_cpu() else 2**34
            return jnp.sort(jnp.ones((size // 4,)) * kernel.value[0, 0])

        result = self._strategy.run(huge)
        self.late.append("run")
        with self._strategy.scope():
            jax.block_until_ready(result)

    def _make_variable(self) -> None:
        import jax
        import keras

        with self._strategy.scope():
            value = keras.Variable(np.zeros((2**15, 2**17), "float32"))  # 16 GiB
            jax.block_until_ready(value.value)

    def _read_input(self) -> None:
        import jax

        batches = self._strategy.distribute_dataset([np.zeros((2**16, 2**16), "float32")])
        value = next(iter(batches))
        with self._strategy.scope():
            jax.block_until_ready(value)


@check(priority=0, timeout_s=150, XLA_PYTHON_CLIENT_MEM_FRACTION="0.06")
def out_of_memory() -> dict[str, Any]:
    """Each way to run out of memory: our error, kept variables, no held memory, a smaller batch."""
    import stratagem as sg

    trial = _Trial(sg.OneDeviceStrategy(device()))
    figures: dict[str, Any] = {"bytes_before": _used_bytes(), "late": trial.late}
    problems: list[str] = []
    for name, way in trial.ways().items():
        before = [np.asarray(weight) for weight in trial.model.get_weights()]
        begin_s = time.monotonic()
        entry = figures[name] = _failed(way)
        entry["failed_after_s"] = time.monotonic() - begin_s
        if "message" not in entry:
            problems.append(f"{name}: {str(entry)[:200]}")
        entry["bytes_after"] = _used_bytes()
        if entry["bytes_after"] - figures["bytes_before"] > 64 * 2**20:
            problems.append(f"{name}: memory is held")
        try:
            after = [np.asarray(weight) for weight in trial.model.get_weights()]
            entry["weights kept"] = all(map(np.array_equal, before, after))
            entry["loss of a smaller batch"] = trial.train_little()
        except Exception as error:  # noqa: BLE001 - a result
            entry["afterwards"] = f"{type(error).__name__}: {error}"[:1500]
            if "lost their values" not in entry.get("message", ""):
                problems.append(f"{name}: unusable afterwards without a word")
            trial.renew()  # as the error says
        print(name, entry, flush=True)
    assert not problems, (problems, figures)
    return figures


def _failed(way: Any) -> dict[str, Any]:
    """Calls a function that runs out of memory; returns its error."""
    import stratagem as sg

    try:
        way()
    except sg.errors.ResourceExhaustedError as error:
        return {"message": str(error), "cause": repr(error.__cause__)[:1500]}
    except Exception as error:  # noqa: BLE001 - a result
        return {"other error": f"{type(error).__name__}: {error}"[:3000]}
    return {"other error": "none"}


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

    import stratagem as sg

    jax.config.update("jax_default_matmul_precision", "highest")
    strategy = sg.CentralStorageStrategy([device()], "pinned_host")
    blocks, created_s = _blocks(strategy, num_blocks, side, create_limit_s)
    block_bytes = side * side * 4
    figures: dict[str, Any] = {"block_bytes": block_bytes, "blocks": len(blocks)}
    figures |= {"bytes": len(blocks) * block_bytes, "create_s": created_s}
    figures["memory_kinds"] = sorted({str(one.stored.sharding.memory_kind) for one in blocks})
    x = np.random.default_rng(0).standard_normal((32, side)).astype("float32")
    touched = sorted({0, len(blocks) // 2, len(blocks) - 1})
    figures["step_s"] = {at: _steps(strategy, blocks[at], x, num_steps) for at in touched}
    best_s = min(min(times) for times in figures["step_s"].values())
    figures["moved_bytes_per_s"] = 2 * block_bytes / best_s
    stats = jax.devices("cpu" if is_on_cpu() else "gpu")[0].memory_stats() or {}
    figures["gpu_peak_bytes"] = stats.get("peak_bytes_in_use")
    figures["gpu_limit_bytes"] = stats.get("bytes_limit")
    columns = np.arange(0, side, max(1, side // 8))
    expected = _expected(x.astype("float64"), columns, num_steps)
    figures["error"] = {
        at: float(np.abs(_columns(blocks[at], columns) - expected).max()) for at in touched
    }
    for at in set(range(1, len(blocks), 16)) - set(touched):
        assert (_columns(blocks[at], columns) == np.float32(1e-3)).all(), at
    assert max(figures["error"].values()) < 1e-6, figures
    assert np.abs(expected - 1e-3).max() > 1e-6, figures
    return figures


def _blocks(
    strategy: Any, count: int, side: int, limit_s: float
) -> tuple[list[Any], dict[str, float]]:
    """Returns blocks, as many as could be made in the time, and the times."""
    import jax
    import keras

    begin_s = time.monotonic()
    blocks: list[Any] = []
    first_s = 0.0
    with strategy.scope():
        while len(blocks) < count and time.monotonic() - begin_s < limit_s:
            value = np.full((side, side), 1e-3, "float32")
            blocks.append(keras.Variable(value, name=f"w{len(blocks)}"))
            jax.block_until_ready(blocks[-1].stored)
            first_s = first_s or time.monotonic() - begin_s
    return blocks, {"first": first_s, "all": time.monotonic() - begin_s}


def _steps(strategy: Any, block: Any, x: np.ndarray[Any, Any], num_steps: int) -> list[float]:
    """Trains one block; returns the time of each step."""
    import jax
    import jax.numpy as jnp

    import stratagem as sg

    def step(batch: Any) -> Any:
        def loss() -> Any:
            return jnp.mean(jnp.tanh(batch @ block.value) * batch)

        value, (gradient,) = sg.value_and_grad(loss, [block])
        block.assign(block.value - 0.5 * gradient)
        return value

    times: list[float] = []
    for _ in range(num_steps):
        begin_s = time.monotonic()
        assert np.isfinite(float(strategy.run(step, args=(x,))))
        jax.block_until_ready(block.stored)
        times.append(time.monotonic() - begin_s)
    return times


def _expected(
    x: np.ndarray[Any, Any], columns: np.ndarray[Any, Any], num_steps: int
) -> np.ndarray[Any, Any]:
    """Columns of a block after these steps, in float64: columns do not depend on each other."""
    values = np.full((x.shape[1], len(columns)), np.float32(1e-3), np.float64)
    for _ in range(num_steps):
        slope = 1 - np.tanh(x @ values) ** 2
        values -= 0.5 * (x.T @ (slope * x[:, columns])) / x.size
    return values


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
