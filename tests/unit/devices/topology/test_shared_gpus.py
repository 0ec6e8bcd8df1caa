"""One GPU in two processes: refused on both, before NCCL is asked."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

from stratagem.devices import processes as shared_gpus


class _Driver:
    """libcuda of a machine with two GPUs; `status` is returned by each of its functions."""

    def __init__(self, status: int = 0) -> None:
        self._status = status

    def cuInit(self, _flags: int) -> int:  # noqa: N802 - a name of CUDA
        return self._status

    def cuDeviceGet(self, device: Any, index: int) -> int:  # noqa: N802
        device._obj.value = index
        return int(index > 1) or self._status

    def uuid(self, uuid: Any, device: ctypes.c_int) -> int:
        uuid[:] = [device.value + 10] * 16
        return self._status


setattr(_Driver, "cuDeviceGetUuid_v2", _Driver.uuid)  # noqa: B010 - CUDA's name, which is no name of ours


def _group(*uuids: list[str | None]) -> Any:
    """A group in which each process reports these GPUs."""
    labels = tuple(f"worker {index} (host:{index})" for index in range(len(uuids)))
    return SimpleNamespace(
        identity=SimpleNamespace(labels=labels), exchange=lambda _name, _own: list(uuids)
    )


def _gpus(*indices: int, platform: str = "gpu") -> list[Any]:
    return [SimpleNamespace(platform=platform, local_hardware_id=index) for index in indices]


def test_two_processes_with_one_gpu_are_named_with_what_to_do() -> None:
    with pytest.raises(
        ValueError,
        match=r"worker 0 \(host:0\), worker 2 \(host:2\) use the same GPU, b(.|\n)*"
        r"CUDA_VISIBLE_DEVICES(.|\n)*SG517",
    ):
        shared_gpus.require_own_gpus(_group(["a", "b"], ["c"], ["b"]), _gpus(0, 1))


def test_gpus_of_their_own_and_unknown_ones_are_accepted() -> None:
    shared_gpus.require_own_gpus(_group(["a"], ["b"]), _gpus(0))
    shared_gpus.require_own_gpus(_group([None], [None]), _gpus(0))
    shared_gpus.require_own_gpus(SimpleNamespace(), _gpus(0, platform="cpu"))  # pyright: ignore[reportArgumentType]


def test_uuid_is_that_of_the_driver(monkeypatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _name: _Driver())
    assert shared_gpus._uuid_of(1) == "GPU-" + "0b" * 16
    assert shared_gpus._uuid_of(2) is None


def test_a_driver_that_is_missing_or_fails_gives_none(monkeypatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _name: _Driver(status=100))
    assert shared_gpus._uuid_of(0) is None

    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert shared_gpus._uuid_of(0) is None
