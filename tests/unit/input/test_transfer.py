"""Transfer: small arrays arrive as those that JAX puts, with the same dtypes and shardings."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from stratagem.devices.finding import find_devices
from stratagem.devices.mesh import Topology
from stratagem.input import placement as module
from stratagem.input.placement import put_arrays, put_steps

DTYPES = ("float32", "float64", "int64", "uint8", "bool", "float16", "complex64")


def topology_of(name: str) -> Topology:
    return Topology(None if name == "default" else find_devices(name.split("+")))


def arrays_for(topology: Topology, *, steps: tuple[int, ...], rows: int = 3) -> list[Any]:
    several = (topology.num_replicas,) if topology.num_replicas > 1 else ()
    shape = (*steps, *several, rows, 4)
    numbers = (np.arange(np.prod(shape)) % 100).reshape(shape)
    return [numbers.astype(dtype) for dtype in DTYPES]


@pytest.mark.parametrize("steps", [(), (5,)])
@pytest.mark.parametrize("name", ["default", "cpu:0", "cpu:1", "cpu:0+cpu:1", "cpu:1+cpu:0"])
def test_program_gives_what_jax_puts(name: str, steps: tuple[int, ...]) -> None:
    topology = topology_of(name)
    arrays = arrays_for(topology, steps=steps)
    options = {"topology": topology, "many": bool(steps)}
    for got, wanted, array in zip(
        put_arrays(arrays, is_repeated=True, **options),
        put_arrays(arrays, is_repeated=False, **options),
        arrays,
        strict=True,
    ):
        assert (got.dtype, got.shape, got.committed) == (
            wanted.dtype,
            wanted.shape,
            wanted.committed,
        )
        assert got.sharding.is_equivalent_to(wanted.sharding, got.ndim)
        assert got.weak_type == wanted.weak_type
        np.testing.assert_array_equal(np.asarray(got), array.astype(got.dtype))


@pytest.mark.parametrize("name", ["default", "cpu:0", "cpu:1", "cpu:0+cpu:1", "cpu:1+cpu:0"])
def test_steps_that_were_put_together_are_what_jax_puts_for_each(name: str) -> None:
    topology = topology_of(name)
    arrays = arrays_for(topology, steps=(5,))
    steps = put_steps(arrays, topology)
    assert len(steps) == 5
    for number, step in enumerate(steps):
        own = [array[number] for array in arrays]
        wanted = put_arrays(own, topology, many=False, is_repeated=False)
        for got, expected in zip(step, wanted, strict=True):
            assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
            assert (got.committed, got.weak_type) == (expected.committed, expected.weak_type)
            assert got.sharding.is_equivalent_to(expected.sharding, got.ndim)
            np.testing.assert_array_equal(np.asarray(got), np.asarray(expected))


@pytest.mark.parametrize("name", ["default", "cpu:0", "cpu:0+cpu:1"])
def test_programs_never_read_the_arrays_of_the_source(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They run after the call, when the source may have changed its arrays."""
    given: list[np.ndarray[Any, Any]] = []

    def watched(make: Any) -> Any:
        def make_watched(*places: Any) -> Any:
            made = make(*places)
            programs = [
                lambda *arrays, run=run: (given.extend(arrays), run(*arrays))[1]
                for run in (made if isinstance(made, list) else [made])
            ]
            return programs if isinstance(made, list) else programs[0]

        return make_watched

    for program in ("_programs", "_unstacking"):
        monkeypatch.setattr(module, program, watched(getattr(module, program)))
    topology = topology_of(name)
    one, several = arrays_for(topology, steps=()), arrays_for(topology, steps=(3,))
    put_arrays(one, topology, many=False, is_repeated=True)
    put_steps(several, topology)
    assert len(given) >= len(one) + len(several)
    assert not any(np.shares_memory(own, array) for own in (*one, *several) for array in given)


def test_array_is_a_copy_of_the_source() -> None:
    """A generator may fill the same array again."""
    (source,) = arrays_for(topology_of("cpu:0"), steps=())[:1]
    (got,) = put_arrays([source], topology_of("cpu:0"), many=False, is_repeated=True)
    jax.block_until_ready(got)
    before = source.copy()
    source[:] = -1
    np.testing.assert_array_equal(np.asarray(got), before)


@pytest.mark.parametrize(("rows", "is_repeated"), [(3, False), (1 << 14, True)])
def test_few_or_large_arrays_need_no_program(
    rows: int, is_repeated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_programs", None)
    topology = topology_of("cpu:0+cpu:1")
    arrays = arrays_for(topology, steps=(), rows=rows)[:1]
    (got,) = put_arrays(arrays, topology, many=False, is_repeated=is_repeated)
    np.testing.assert_array_equal(np.asarray(got), arrays[0])


def test_batch_without_arrays() -> None:
    assert put_arrays([], topology_of("cpu:0+cpu:1"), many=False, is_repeated=True) == []


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_large_transfers_to_a_gpu_are_followed_by_an_empty_program_on_each_device(
    num_replicas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    original = module._empty_program

    def noted(device: jax.Device) -> Any:
        return lambda: started.append(original(device)())

    monkeypatch.setattr(module, "_empty_program", noted)
    topology = topology_of("cpu:0" if num_replicas == 1 else "cpu:0+cpu:1")
    large = np.ones((num_replicas, 20_000), "float32")
    put_arrays([large], topology, many=False, is_repeated=False)
    assert started == []  # CPU
    monkeypatch.setattr(module, "_waits_for_programs", lambda topology: True)
    put_arrays([large[:, :8], jax.numpy.asarray(large)], topology, many=False, is_repeated=False)
    assert started == []
    put_arrays([large, large], topology, many=False, is_repeated=False)
    assert [one.devices() for one in started] == [{device} for device in topology.devices or ()]
