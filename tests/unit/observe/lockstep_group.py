"""Workers in lockstep, simulated step by step: what each writes, and who was slow in truth."""

from __future__ import annotations

import dataclasses
import random

from stratagem.observe.events import StepEvent

Line = tuple[str, float, StepEvent]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """Equal workers, whose times vary by `noise`, except for one.

    `extra_s` is added to each step of worker `slow` from its number `begin` to `end`: to its input
    or its computing.
    """

    num_workers: int
    num_steps: int = 200
    input_s: float = 0.02
    compute_s: float = 0.2
    transfer_s: float = 0.03
    noise: float = 0.05
    slow: int = 0
    cause: str = "none"
    extra_s: float = 0.0
    begin: int = 0
    end: int = 10**9
    measures_transfers: bool = True
    seed: int = 0

    def lines(self) -> list[Line]:
        """Returns the lines that all workers write, about one a second."""
        rng = random.Random(self.seed)
        workers = [
            _Worker(rank, rng.uniform(0.5, 1.5), measures=self.measures_transfers)
            for rank in range(self.num_workers)
        ]
        begin_s = 0.0
        for step in range(1, self.num_steps + 1):
            begin_s = self._run_step(step, begin_s, workers, rng)
        return [line for worker in workers for line in [*worker.lines, *worker.rest()]]

    def _run_step(
        self, step: int, begin_s: float, workers: list[_Worker], rng: random.Random
    ) -> float:
        extra_s = self.extra_s if self.begin < step <= self.end else 0.0

        def varied(time_s: float, rank: int, cause: str) -> float:
            is_slow = rank == self.slow and cause == self.cause
            return time_s * rng.lognormvariate(0, self.noise) + (extra_s if is_slow else 0.0)

        ranks = range(self.num_workers)
        inputs = [varied(self.input_s, rank, "input") for rank in ranks]
        computing = [varied(self.compute_s, rank, "compute") for rank in ranks]
        arrived = [begin_s + inputs[rank] + computing[rank] for rank in ranks]
        last_s = max(arrived)

        end_s = last_s + max(self.transfer_s * rng.lognormvariate(0, self.noise) for _ in ranks)
        for rank, worker in enumerate(workers):
            worker.add(step, end_s, inputs[rank], last_s - arrived[rank], end_s - last_s)
        return end_s


class _Worker:
    """Adds up the steps of a worker, and writes them when a second is over."""

    def __init__(self, rank: int, first_s: float, *, measures: bool) -> None:
        self.task, self.lines = f"worker {rank}", list[Line]()
        self._due_s, self._measures, self._begin_s = first_s, measures, 0.0
        self._clear(0.0)

    def _clear(self, now_s: float) -> None:
        self._begin_s, self._num_steps, self._step = now_s, 0, 0
        self._input_s = self._peers_s = self._transfer_s = 0.0
        self._end_s = now_s

    def add(self, step, end_s, input_s, peers_s, transfer_s) -> None:
        self._step, self._end_s = step, end_s
        self._num_steps += 1
        self._input_s += input_s
        self._peers_s += peers_s
        self._transfer_s += transfer_s
        if end_s >= self._due_s:
            self._due_s = end_s + 1.0
            self.lines += self.rest()
            self._clear(end_s)

    def rest(self) -> list[Line]:
        if not self._num_steps:
            return []
        event = step_event(
            self._step,
            self._num_steps,
            self._end_s - self._begin_s,
            self._peers_s + self._transfer_s,
            input_s=self._input_s,
            peers_s=self._peers_s if self._measures else 0.0,
            transfer_s=self._transfer_s if self._measures else None,
        )
        return [(self.task, self._end_s, event)]


def step_event(step: int, num_steps: int, elapsed_s: float, waited_s: float | None, **more):
    """A line of steps up to number `step`."""
    return StepEvent(
        time_s=0.0,
        monotonic_s=0.0,
        step=step,
        num_steps=num_steps,
        duration_s=elapsed_s,
        elapsed_s=elapsed_s,
        keeping_s=0.0,
        waited_s=waited_s,
        **more,
    )
