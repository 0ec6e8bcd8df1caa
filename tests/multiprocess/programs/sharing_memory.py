"""Sums in shared memory in steps, loops of steps, and programs around them.

`python sharing_memory.py HOW`: HOW is sums; end, without waiting for the last ones; or what worker
1 does after a few of them: kill, midway (kill within a sum), stop, raise or leave.
"""

from __future__ import annotations

import os
import signal
import sys

import stratagem as sg  # isort: skip - before jax, because it readies the collectives

import jax
import jax.numpy as jnp
import numpy as np

from stratagem.devices.shared_sums import SharedArea

(how,) = sys.argv[1:]
strategy = sg.MultiWorkerMirroredStrategy()
count, own = strategy.num_replicas_in_sync, jax.process_index()
SIZES = (1, 7, 1000, 300_000, 1_500_000)


def parts(seed: int) -> list[list[np.ndarray]]:
    """Arrays of each replica."""
    chance = np.random.default_rng(seed)
    kinds = ("float32", "int32", "float32", "float32", "float32")
    return [
        [
            (chance.normal(size=size) * 100).astype(kind)
            for size, kind in zip(SIZES, kinds, strict=True)
        ]
        for _ in range(count)
    ]


def add(values):
    """Adds without a dependency between the sums."""
    return [sg.get_replica_context().all_reduce("SUM", value) for value in values]


def distributed(seed: int):
    of_all = parts(seed)
    return [
        strategy.distribute_values_from_function(
            lambda context, place=place: of_all[context.replica_id_in_sync_group][place]
        )
        for place in range(len(SIZES))
    ]


def check(results, seed: int) -> None:
    of_all = parts(seed)
    for place, result in enumerate(results):
        expected = of_all[0][place]
        for part in of_all[1:]:
            expected = expected + part[place]
        for local in strategy.local_results(result):
            np.testing.assert_allclose(local, expected, rtol=1e-5, atol=1e-4)


total = sg.Variable(np.zeros(100_000, "float32"))


def accumulate(batch):
    context = sg.get_replica_context()
    mean = context.all_reduce("MEAN", batch[0] + jnp.zeros(100_000))
    total.assign(total.value + mean)
    return context.all_reduce("SUM", jnp.full(50_000, 2.0))[0]  # needs no other step


def sums() -> None:
    for seed in range(5):
        check(strategy.run(add, args=(distributed(seed),)), seed)

    @sg.function
    def outer(values):
        return strategy.run(add, args=(values,))

    check(outer(distributed(9)), 9)

    def in_loop(value):
        context = sg.get_replica_context()
        return jax.lax.fori_loop(0, 3, lambda _, x: context.all_reduce("MEAN", x), value)

    looped = strategy.run(in_loop, args=(distributed(3)[2],))
    expected = np.mean([part[2] for part in parts(3)], axis=0)
    np.testing.assert_allclose(strategy.local_results(looped)[0], expected, rtol=1e-5, atol=1e-5)

    data = strategy.distribute_dataset(
        sg.input.Dataset(np.arange(8 * count, dtype="float32"), batch_size=count)
    )
    others = strategy.run_steps(accumulate, iter(data), 8)
    np.testing.assert_array_equal(strategy.local_results(others)[0], np.full(8, 2.0 * count))
    np.testing.assert_allclose(total.numpy(), np.arange(8 * count).sum() / count, rtol=1e-6)
    print("equal")


def lose() -> None:
    if how == "raise":
        raise ValueError("a bug")
    if how == "leave":
        raise SystemExit(0)
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[how])


def lose_midway() -> None:
    finish = SharedArea.finish_round

    def finish_or_end(area, rank, number, is_lost):
        if number == 53:  # a step has 2 + 4 rounds: the sum of three blocks is half done
            os.kill(os.getpid(), signal.SIGKILL)
        finish(area, rank, number, is_lost)

    SharedArea.finish_round = finish_or_end


def lose_one() -> None:
    if how == "midway" and own == 1:
        lose_midway()
    values = distributed(0)[3:]  # smaller ones are sent by Gloo, which waits inside JAX
    try:
        for number in range(1000):
            strategy.run(add, args=(values,))
            if number == 20 and own == 1 and how != "midway":
                lose()
    except sg.errors.UnavailableError as error:
        print("caught", "worker 1" in str(error), flush=True)


if how == "sums":
    sums()
elif how == "end":
    for _ in range(5):
        strategy.run(add, args=(distributed(0)[3:],))
else:
    lose_one()
are_ordered = [program.step.is_ordered for program in strategy.executor.programs]
print("ordered", sum(are_ordered), "of", len(are_ordered), flush=True)
