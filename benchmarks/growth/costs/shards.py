"""Files of a dataset, divided over processes."""

from __future__ import annotations

from collections.abc import Sequence

import stratagem as sg  # isort: skip - before keras, because it selects the JAX backend

import numpy as np

from benchmarks.growth.costs.serving import Answer, cpu_s, least, serve_costs
from stratagem.input.distributed import InputShard
from stratagem.input.sources.adapters import as_source

__all__ = ["measure"]

_NUM_PROCESSES = 64
_EXAMPLES_PER_FILE = 64
_MOST_STEPS = 1000


def measure(size: int, *, is_smallest: bool) -> Answer:
    """Returns the CPU time of one process of 64 for its part of `size` files, of a batch each.

    The files are names only: reading them is not ours.
    """
    num_times = 1 if is_smallest else 3
    num_steps = min(size, _MOST_STEPS)
    names = [f"/data/shard-{index:07}-of-{size:07}" for index in range(size)]

    def shard() -> InputShard:
        dataset = sg.input.Dataset.from_files(names, _read)
        context = sg.InputContext(_NUM_PROCESSES, 1, _NUM_PROCESSES)
        return InputShard.of(as_source(dataset), sg.AutoShardPolicy.FILE, context)

    own = shard()

    def read() -> None:
        reader = own.open(0)
        for _ in range(num_steps):
            reader.read()

    def resume() -> None:
        reader = own.open(0)
        for _ in range(num_steps // 2):
            reader.read()
        state = reader.state()
        again = own.open(0)
        again.restore(state)

    return {
        "ours": {
            "shard_s": least(num_times, lambda: cpu_s(shard)),
            "step_s": least(num_times, lambda: cpu_s(read)) / num_steps,
            "resume_s": least(num_times, lambda: cpu_s(resume)),
        }
    }


def _read(names: Sequence[str]) -> sg.input.Dataset:
    """Returns a batch for each file."""
    return sg.input.Dataset(
        np.arange(len(names) * _EXAMPLES_PER_FILE), batch_size=_EXAMPLES_PER_FILE
    )


if __name__ == "__main__":
    serve_costs(measure)
