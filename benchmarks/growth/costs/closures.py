"""Functions that do nothing, scheduled on two workers of a parameter-server cluster, and queued."""

from __future__ import annotations

from typing import Any

import stratagem as sg  # isort: skip - before keras, because it selects the JAX backend

from benchmarks.growth.costs.serving import Answer, cpu_s, serve_costs
from stratagem.parameter_server.coordinator.closure_queue import ClosureQueue
from stratagem.parameter_server.coordinator.remote_value import Closure

__all__ = ["measure"]

_NUM_WORKERS = 2


def measure(size: int, *, is_smallest: bool) -> Answer:
    """Returns the CPU time of the coordinator for `size` functions, and that of their queue."""
    del is_smallest
    return {
        "ours": {
            "coordinator_s": _coordinator_s(size),
            "queue_s": cpu_s(lambda: _run_queue(size)),
            "backlog_s": cpu_s(lambda: _run_queue(size, is_full=True)),
        }
    }


def _coordinator_s(num_closures: int) -> float:
    """Schedules functions on workers in processes of their own, and waits for them."""
    with sg.ParameterServerStrategy(num_workers=_NUM_WORKERS, num_servers=1) as strategy:
        coordinator = sg.coordinator.ClusterCoordinator(strategy)

        def run(num: int) -> None:
            for _ in range(num):
                coordinator.schedule(_nothing)
            coordinator.join()

        run(2 * _NUM_WORKERS)  # the function travels once
        return cpu_s(lambda: run(num_closures))


def _run_queue(num_closures: int, *, is_full: bool = False) -> None:
    """Schedules functions and finishes them in turns, or all of them at the end."""
    queue = ClosureQueue(capacity=num_closures + 1)

    def finish() -> None:
        (closure,) = queue.take(0)
        queue.finish(closure, None)

    call: Any = None
    for _ in range(num_closures):
        queue.put(Closure(call, name="nothing"))
        if not is_full:
            finish()
    for _ in range(num_closures if is_full else 0):
        finish()
    assert queue.is_done()


def _nothing() -> None:
    pass


if __name__ == "__main__":
    serve_costs(measure)
