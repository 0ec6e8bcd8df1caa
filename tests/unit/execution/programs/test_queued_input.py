"""Calls that have not finished hold a bounded amount of input on the devices."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stratagem as sg
from stratagem.execution.programs import program as queued_input
from stratagem.execution.programs.program import QueuedInput, input_bytes, is_large
from tests.parity.comparison import mirrored

_MEBIBYTE = 1 << 20


class _Call:
    """A call in flight, which notes when it is awaited."""

    def __init__(self, awaited: list[int], number: int) -> None:
        self._awaited, self._number = awaited, number

    def block_until_ready(self) -> None:
        self._awaited.append(self._number)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([300] * 6, [0, 1, 2]),  # 3 x 300 MiB fit into 1 GiB
        ([64] * 20, [0, 1, 2, 3]),
        ([5000] * 4, [0, 1]),  # one runs and one waits
        ([5000, 64, 64, 64], [0]),
        ([512, 512], []),
    ],
)
def test_oldest_calls_are_awaited_while_they_hold_too_much(
    sizes: list[int], expected: list[int]
) -> None:
    awaited: list[int] = []
    queue = QueuedInput()
    for number, size in enumerate(sizes):
        queue.add(_Call(awaited, number), size * _MEBIBYTE)
    assert awaited == expected


def test_calls_are_large_if_as_many_as_jax_allows_hold_more_than_the_bound() -> None:
    assert not is_large(32 * _MEBIBYTE)
    assert is_large(32 * _MEBIBYTE + 1)


def test_size_of_input_counts_arrays_and_random_keys() -> None:
    arrays = [np.zeros((2, 3), "int16"), jnp.zeros(4), jax.random.key(0), 3.0]
    assert input_bytes(arrays) == 12 + 16 + 8


def _by_run(strategy: sg.Strategy, step: Callable[..., None], data: sg.DistributedDataset) -> None:
    for batch in data:
        strategy.run(step, args=(batch,))


def _by_run_steps(
    strategy: sg.Strategy, step: Callable[..., None], data: sg.DistributedDataset
) -> None:
    iterator = iter(data)
    for _ in range(4):
        strategy.run_steps(step, iterator, 2)


@pytest.mark.parametrize("loop", [_by_run, _by_run_steps])
@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("is_bounded", [False, True])
def test_steps_wait_for_earlier_steps_only_if_their_input_is_large(
    loop: Callable[..., None],
    num_replicas: int,
    is_bounded: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes: list[int] = []
    add = QueuedInput.add
    monkeypatch.setattr(
        QueuedInput, "add", lambda self, done, size: sizes.append(size) or add(self, done, size)
    )
    if is_bounded:
        monkeypatch.setattr(queued_input, "_MOST_BYTES", 2500)
    strategy = mirrored(num_replicas)
    with strategy.scope():
        total = sg.Variable(0.0, aggregation="sum")
    data = strategy.distribute_dataset([np.full((8, 40), n, "float32") for n in range(8)])
    loop(strategy, lambda batch: total.assign_add(batch.sum()), data)
    assert float(total.numpy()) == 320 * sum(range(8))
    if not is_bounded:
        assert sizes == []
    elif loop is _by_run:
        assert sizes == [1280 // num_replicas] * 8
    else:
        assert sizes == [2560 // num_replicas] * 4
