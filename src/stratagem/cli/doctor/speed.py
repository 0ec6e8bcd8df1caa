"""Speed of a collective, of parameter servers and of checkpoints, beside that of the hardware.

Each is measured in a process of its own: `python -m stratagem.cli.doctor.speed NAME`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import stratagem as sg
from stratagem import environment
from stratagem.cli.doctor.findings import Finding, Level

_MARKER = "STRATAGEM_MEASURED"
_LIMIT_S = 120
_TOPIC = "trial"
_ARRAY_BYTES = 2**24
_NUM_ROUNDS = 7


@dataclasses.dataclass(frozen=True)
class Measured:
    """One figure beside its reference on the same machine, in bytes per second.

    Args:
        what: operation.
        bytes_per_s: its speed.
        reference: operation of the hardware alone.
        reference_bytes_per_s: its speed.
    """

    what: str
    bytes_per_s: float
    reference: str
    reference_bytes_per_s: float


def collective() -> Measured:
    """Measures the sum of an array over the local devices."""
    import jax
    import jax.numpy as jnp

    devices = jax.local_devices()
    names = [f"{devices[0].platform}:{index}" for index in range(len(devices))]
    strategy = sg.MirroredStrategy(names if len(names) > 1 else ["cpu:0", "cpu:1"])
    array = jnp.ones(_ARRAY_BYTES // 4, jnp.float32)
    values = strategy.run(lambda: array * 1.0)
    reduce = sg.ReduceOp.SUM

    def add() -> None:
        jax.block_until_ready(strategy.reduce(reduce, values, axis=None))

    host = np.ones(_ARRAY_BYTES, np.uint8)
    return Measured(
        f"sum over {strategy.num_replicas_in_sync} replicas",
        _ARRAY_BYTES / _median_s(add),
        "copy in host memory",
        _ARRAY_BYTES / _median_s(host.copy),
    )


def parameter_servers() -> Measured:
    """Measures writing and reading a variable on a server of this machine."""
    strategy = sg.ParameterServerStrategy(num_workers=1, num_servers=1)
    with strategy.scope():
        variable = sg.Variable(np.zeros(_ARRAY_BYTES // 4, "float32"))
    array = np.ones(_ARRAY_BYTES // 4, "float32")

    def exchange() -> None:
        variable.assign(array)
        np.asarray(variable.value)

    return Measured(
        "push and pull of a variable",
        2 * _ARRAY_BYTES / _median_s(exchange),
        "loopback socket",
        _ARRAY_BYTES / _median_s(_send_over_loopback),
    )


def checkpoint() -> Measured:
    """Measures saving and restoring an array in the current folder."""
    import jax.numpy as jnp

    folder = Path(tempfile.mkdtemp(prefix=".stratagem-doctor-", dir=os.getcwd()))
    array = np.random.default_rng(0).integers(0, 256, _ARRAY_BYTES, np.uint8)

    saved = sg.train.Checkpoint(array=jnp.asarray(array))

    def save_and_restore() -> None:
        saved.restore(saved.save(str(folder / "checkpoint")))

    def write_and_read() -> None:
        with open(folder / "file", "wb") as file:
            file.write(array.tobytes())
            os.fsync(file.fileno())
        (folder / "file").read_bytes()

    try:
        return Measured(
            "save and restore of a checkpoint",
            2 * _ARRAY_BYTES / _median_s(save_and_restore),
            "write, fsync and read of a file",
            2 * _ARRAY_BYTES / _median_s(write_and_read),
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


MEASUREMENTS: dict[str, Callable[[], Measured]] = {
    "collective": collective,
    "parameter_servers": parameter_servers,
    "checkpoint": checkpoint,
}


def print_measured(name: str) -> None:
    """Prints one measurement as JSON."""
    print(_MARKER, json.dumps(dataclasses.asdict(MEASUREMENTS[name]())), flush=True)


def measure(
    names: Iterable[str] = tuple(MEASUREMENTS), limit_s: float = _LIMIT_S
) -> Iterator[Finding]:
    """Measures each; yields the speed beside that of the hardware, or why it failed."""
    for name in names:
        try:
            finished = subprocess.run(  # noqa: S603 - our own program
                [sys.executable, "-m", "stratagem.cli.doctor.speed", name],
                capture_output=True,
                text=True,
                timeout=limit_s,
                check=False,
                env={"JAX_NUM_CPU_DEVICES": "2", **environment.snapshot_outside_cluster()},
            )
        except subprocess.TimeoutExpired:
            yield _failed(name, f"not finished after {limit_s:.0f} s")
            continue
        lines = [line for line in finished.stdout.splitlines() if line.startswith(_MARKER)]
        if finished.returncode or not lines:
            errors = [line for line in finished.stderr.splitlines() if line.strip()] or [
                "no output"
            ]
            yield _failed(name, errors[-1][:200])
            continue
        measured = json.loads(lines[-1].removeprefix(_MARKER))
        yield Finding(
            _TOPIC,
            Level.OK,
            f"{measured['what']}: {_rate(measured['bytes_per_s'])} "
            f"({measured['reference']}: {_rate(measured['reference_bytes_per_s'])}).",
        )


def _failed(name: str, reason: str) -> Finding:
    return Finding(
        _TOPIC,
        Level.ERROR,
        f"{name} failed: {reason}",
        f"run {sys.executable} -m stratagem.cli.doctor.speed {name} for the whole error.",
    )


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2f} GB/s"


def _median_s(call: Callable[[], Any]) -> float:
    call()  # compiles, connects, fills caches
    times: list[float] = []
    for _ in range(_NUM_ROUNDS):
        started_s = time.perf_counter()
        call()
        times.append(time.perf_counter() - started_s)
    return statistics.median(times)


def _send_over_loopback() -> None:
    data = bytes(_ARRAY_BYTES)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sender = threading.Thread(target=_send, args=(listener.getsockname(), data))
        sender.start()
        connection, _ = listener.accept()
        with connection:
            while connection.recv(2**20):
                pass
        sender.join()


def _send(address: tuple[str, int], data: bytes) -> None:
    with socket.create_connection(address) as connection:
        connection.sendall(data)


if __name__ == "__main__":
    print_measured(sys.argv[1])
