"""A simulation of workers, consumers and a dispatcher around a job, with a ledger of all batches.

Any order of events can occur: batches and reports are under way for as long as chance wants, and a
killed worker's last batches may still arrive. The dispatcher can be killed after each record.
"""

from __future__ import annotations

import collections
import json
import random
from typing import Any

from stratagem.input.service.job import NumberRanges, Record, ServiceJob


class Held:
    """A split at a worker: the batches that it has still to send, and those not confirmed."""

    def __init__(self, split: int, attempt: int, to_send: list[int]) -> None:
        self.split, self.attempt, self.to_send = split, attempt, to_send
        self.unconfirmed: set[int] = set()


class SimulatedJob:
    """Runs a job to its end; `ledger` counts how often each batch was returned to a user."""

    def __init__(
        self,
        seed: int,
        lengths: list[int],
        *,
        num_workers: int = 3,
        num_consumers: int = 2,
        kill_rate: float = 0.03,
        consumer_kill_rate: float = 0.0,
        **options: Any,
    ) -> None:
        self.random = random.Random(seed)
        self.lengths = lengths
        self.kill_rate, self.consumer_kill_rate = kill_rate, consumer_kill_rate
        self._make = lambda: ServiceJob(len(lengths), most_losses=10**6, **options)
        self.job = self._make()
        self.journal: list[str] = []
        self.num_named = 0
        self.workers: dict[str, dict[int, Held]] = {}
        self.consumers: dict[str, dict[str, Any]] = {}
        self.under_way: list[tuple[str, str, Held, int]] = []  # consumer, worker, split, index
        self.ledger: collections.Counter[tuple[int, int]] = collections.Counter()
        for _ in range(num_workers):
            self._add_worker()
        for number in range(num_consumers):
            name = f"consumer {number}"
            self.consumers[name] = {"attempts": {}, "has": {}}
            self._change([{"what": "join", "consumer": name}])

    def _add_worker(self) -> None:
        self.workers[f"worker {self.num_named}"] = {}
        self.num_named += 1

    def _change(self, records: list[Record]) -> None:
        for record in records:
            self.journal.append(json.dumps(record))
            if self.random.random() < self.kill_rate:  # killed before it applied the record
                self.job = self._make()
                for line in self.journal:
                    self.job.apply(json.loads(line))
            else:
                self.job.apply(record)

    def run(self) -> None:
        """Takes random events until the job is done."""
        events = [
            self._ask, self._ask, self._send, self._send, self._send,
            self._arrive, self._arrive, self._arrive, self._done, self._report,
        ]  # fmt: skip
        for _ in range(200_000):
            if self.job.finish(list(self.workers)):
                break
            self.random.choice(events)()
            if self.random.random() < self.kill_rate:
                self._kill_worker()
            if self.random.random() < self.consumer_kill_rate and len(self.consumers) > 1:
                self._kill_consumer()
        else:
            raise AssertionError("the job did not end")

    def _ask(self) -> None:
        worker = self.random.choice(list(self.workers))
        held = self.workers[worker]
        holding = {split.split: split.attempt for split in held.values()}
        records, answer = self.job.next_split(worker, holding)
        self._change(records)
        # The answer may be lost; then the next question gets it again.
        if answer is not None and self.random.random() > 0.2:
            received = NumberRanges(answer["received"])
            number = answer["split"]
            rest = [index for index in range(self.lengths[number]) if index not in received]
            held[number] = Held(number, answer["attempt"], rest)

    def _send(self) -> None:
        worker = self.random.choice(list(self.workers))
        sending = [held for held in self.workers[worker].values() if held.to_send]
        if sending and self.consumers:
            held = sending[0]
            index = held.to_send.pop(0)
            held.unconfirmed.add(index)
            self.under_way.append((self.random.choice(list(self.consumers)), worker, held, index))

    def _arrive(self) -> None:
        if not self.under_way:
            return
        arrived = self.under_way.pop(self.random.randrange(len(self.under_way)))
        name, _, held, index = arrived
        consumer = self.consumers.get(name)
        if consumer is None:
            return
        if held.attempt >= consumer["attempts"].get(held.split, 0):
            consumer["has"].setdefault(held.split, NumberRanges()).add(index)
            self.ledger[held.split, index] += 1
        held.unconfirmed.discard(index)

    def _done(self) -> None:
        for worker, splits in self.workers.items():
            for held in [*splits.values()]:
                if not held.to_send and not held.unconfirmed:
                    self._change(self.job.done_split(worker, held.split, held.attempt))
                    del splits[held.split]

    def _report(self) -> None:
        name = self.random.choice(list(self.consumers))
        consumer = self.consumers[name]
        for split, attempt in self.job.awaited_of(name).items():
            consumer["attempts"][split] = attempt
            ranges = consumer["has"].get(split, NumberRanges()).as_json()
            self._change(self.job.report(name, split, attempt, ranges))

    def _kill_worker(self) -> None:
        worker = self.random.choice(list(self.workers))
        del self.workers[worker]
        self._change(self.job.lose_worker(worker))
        self._add_worker()

    def _kill_consumer(self) -> None:
        name = self.random.choice(list(self.consumers))
        del self.consumers[name]
        self._change([{"what": "leave", "consumer": name}])
