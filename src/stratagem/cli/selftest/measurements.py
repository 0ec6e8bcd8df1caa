"""Speed of a collective, of parameter servers and of checkpoints, beside that of the hardware.

`python -m stratagem.cli.selftest.measurements NAME` measures one, in a process of its own.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import stratagem as sg

MARKER = "STRATAGEM_MEASURED"
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


def main(name: str) -> None:
    """Prints one measurement as JSON."""
    print(MARKER, json.dumps(dataclasses.asdict(MEASUREMENTS[name]())), flush=True)


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
    main(sys.argv[1])
