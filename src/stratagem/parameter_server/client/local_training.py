"""A worker's own weights and optimizer state between synchronizations with the servers.

A round begins with values of the servers, which the first step fetches. Later steps of the round
send and fetch nothing. At its end, the servers receive the change of each trained weight.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from stratagem.parameter_server.client.variable_client import (
    RemoteVariable,
    VariableClient,
    name_of,
)
from stratagem.parameter_server.server.shards import ShardSpec
from stratagem.parameter_server.server.store import ServerVariables
from stratagem.parameter_server.server.updates import (
    LocalRounds,
    OuterUpdate,
    RoundCounter,
    UpdateRule,
    is_stored_by,
    outer_name,
    own_name,
    stored_name,
)

# The rule of averages, such as those of batch normalization.
_AVERAGES = outer_name("averages")


@dataclasses.dataclass
class _Optimizer:
    """Local copy of an optimizer: a server that has its scalars, and their values there."""

    server: int
    slots: dict[str, list[str]]  # slot names by variable
    seen: dict[str, np.ndarray]


class LocalTraining:
    """Weights, other variables and optimizer state of one worker.

    `ends_round`, if set, says whether the next step is the last of its round; otherwise this worker
    counts its steps.
    """

    def __init__(self, variables: VariableClient, rounds: LocalRounds) -> None:
        self.counter = RoundCounter(rounds)
        self.ends_round: bool | None = None
        self._client = variables
        self._rounds = rounds
        self._store = ServerVariables()
        self._optimizers: dict[str, _Optimizer] = {}
        self._averages: set[str] = set()
        self._active: set[str] = set()  # optimizers of this round or the one before
        self._unsent: set[str] = set()  # optimizers whose slots have changed
        self._begin()

    def _begin(self) -> None:
        self._start: dict[str, np.ndarray] = {}
        self._trained: dict[str, str] = {}  # optimizers by variable
        self._written: dict[str, tuple[RemoteVariable, bool]] = {}

    def has_optimizer(self, name: str) -> bool:
        """Returns True if an optimizer has its state here."""
        return name in self._optimizers

    def add_optimizer(
        self, name: str, rule: UpdateRule, trained: Sequence[RemoteVariable], server: int
    ) -> None:
        """Makes a rule train variables here, with the slots and scalars of the servers.

        Keeps the own ones of an optimizer that is here already. `server` has its scalars.
        """
        self.values(trained)
        shapes = {name_of(one): (tuple(one.shape), str(one.dtype)) for one in trained}
        slots = {
            variable: [stored_name(name, slot.name) for slot in rule.slots(variable, *shape)]
            for variable, shape in shapes.items()
        }
        is_new = name not in self._optimizers
        known = {} if is_new else self._optimizers[name].slots
        self._store.set_rule(rule, list(shapes), name)
        full = [
            f"{variable}:{slot}"
            for variable, own in slots.items()
            if variable not in known
            for slot in own
        ]
        for slot, value in (self._client.pull(full) if full else {}).items():
            self._store.assign(slot, np.asarray(value))
        if is_new:
            self._optimizers[name] = _Optimizer(server, slots, {})
        else:
            self._optimizers[name].slots = known | slots

    def values(self, variables: Sequence[RemoteVariable]) -> dict[int, Any]:
        """Returns values by identity of the variables; fetches those that are new in the round."""
        named = {name_of(one): one for one in variables}
        missing = [name for name in named if name not in self._start]
        if missing:
            if not self._start:
                for name in sorted(self._active):
                    self._adopt_scalars(name)
            for name, value in self._client.pull(missing).items():
                self._start_with(named[name], np.array(value))
        found = dict(zip(named, self._store.pull(list(named)), strict=True))
        return {id(one): found[name_of(one)] for one in variables}

    def scalar(self, name: str) -> np.ndarray | None:
        """Returns an optimizer's scalar by its stored name; None if it is not here."""
        return self._store.scalars.get(name)

    def assign(self, values: Mapping[str, tuple[np.ndarray, int]]) -> None:
        """Sets variables and slots by name; with sign 1, adds to them."""
        for name, (value, sign) in values.items():
            self._store.assign(name, value, sign=sign)

    def update(self, gradients: Mapping[str, np.ndarray], optimizers: Mapping[str, str]) -> None:
        """Applies gradients, by name of the variable, with the optimizers of a step."""
        if not gradients:
            return
        own = {name: optimizers[name] for name in gradients}
        for name in sorted({*own.values()} - self._active):
            self._adopt_scalars(name)
        self._active.update(own.values())
        self._unsent.update(own.values())
        self._trained.update(own)
        self._store.update(gradients, {}, own)

    def write(
        self, variable: RemoteVariable, before: np.ndarray, after: np.ndarray, *, is_added: bool
    ) -> None:
        """Stores what a step wrote: as a difference if it `is_added` to the value."""
        name = name_of(variable)
        if is_added:
            self._store.assign(name, after - before, sign=1)
        else:
            self._store.assign(name, np.asarray(after))
        self._written[name] = (variable, is_added)

    def end_step(self) -> None:
        """Counts a training step, and ends the round if it was the last one."""
        is_end, self.ends_round = self.ends_round, None
        if is_end:
            # If this function runs again, because its worker is lost, its round ends again, too.
            self._send_round()
        elif is_end is None and self.counter.step():
            self.end_round()

    def end_round(self, *, sends_state: bool = False) -> None:
        """Sends the changes of this round, if it has any, to the servers.

        `sends_state` also sends the optimizers' state, for files and restarted workers. The
        changes belong to no scheduled function: one that runs again, because its worker is lost,
        repeats a step, but not the round.
        """
        with self._client.client.in_function(None):
            self._send_round()
            if sends_state:
                self._send_state()
        self.counter.restart()

    def _send_round(self) -> None:
        if self._start:
            self._send_changes(self._send_written())
            self._active = {*self._trained.values()}
            self._begin()

    def _start_with(self, variable: RemoteVariable, value: np.ndarray) -> None:
        name = name_of(variable)
        spec = ShardSpec(name, tuple(value.shape), str(value.dtype))
        if not self._store.create(spec, lambda: value):
            self._store.assign(name, value)
        self._start[name] = value

    def _send_written(self) -> list[str]:
        """Sends what steps wrote besides updates, but returns the names of averages.

        The changes of averages are sent with those of weights, to become the workers' mean.
        """
        averages: list[str] = []
        for name, (variable, is_added) in self._written.items():
            if name in self._trained:
                continue
            (value,) = self._store.pull([name])
            if not is_added:
                self._client.assign(variable, value)
            elif variable.is_added_to and value.dtype.kind not in "iub":
                averages.append(name)
            else:
                self._client.assign(variable, value - self._start[name], sign=1)
        if {*averages} - self._averages:
            self._averages.update(averages)
            self._give_average_rule()
        return averages

    def _give_average_rule(self) -> None:
        rule = OuterUpdate(dataclasses.replace(self._rounds, learning_rate=1.0, momentum=None))
        client = self._client.client
        client.set_rule(rule, sorted(self._averages), None, _AVERAGES)
        # A server that restarts asks only for rules that its journal describes.
        states = client.describe().values()
        if all(state["journaled_version"] is not None for state in states):
            client.journal()

    def _send_changes(self, averages: Sequence[str]) -> None:
        optimizers = {name: outer_name(own) for name, own in self._trained.items()}
        optimizers |= dict.fromkeys(averages, _AVERAGES)
        values = dict(zip(optimizers, self._store.pull(list(optimizers)), strict=True))
        changes = {name: value - self._start[name] for name, value in values.items()}
        scalars: dict[str, float] = {}
        for name in dict.fromkeys(self._trained.values()):
            scalars |= self._counts(name)
        if changes:
            self._client.push(changes, {}, optimizers=optimizers, pull=[], scalars=scalars)

    def _counts(self, name: str) -> dict[str, float]:
        """Returns an optimizer's counters; the servers keep the larger ones of theirs and these."""
        own = self._scalars_of(name).items()
        return {stored_name(name, key): one.item() for key, one in own if one.dtype.kind in "iu"}

    def _scalars_of(self, name: str) -> dict[str, np.ndarray]:
        stored = self._store.scalars.items()
        return {
            own_name(name, key): np.asarray(value)
            for key, value in stored
            if is_stored_by(name, key)
        }

    def _adopt_scalars(self, name: str) -> None:
        """Takes over scalars that were changed on the servers, and counters that are larger there.

        A learning rate, say, that a callback of the coordinator has set.
        """
        optimizer = self._optimizers[name]
        there = self._client.scalars(optimizer.server)
        if not any(is_stored_by(name, key) for key in there):
            # The program has no such optimizer any more, and the servers have dropped it.
            self._store.drop_rule(name)
            self._active.discard(name)
            del self._optimizers[name]
            return
        for key, value in self._scalars_of(name).items():
            full = stored_name(name, key)
            found = np.array(there[full])
            if value.dtype.kind in "iu":
                is_adopted = found > value
            else:
                is_adopted = key not in optimizer.seen or found != optimizer.seen[key]
            if is_adopted:
                self._store.set_scalars({full: found})
            optimizer.seen[key] = found

    def _send_state(self) -> None:
        """Sends slots and other numbers of the optimizers that have trained since the last time."""
        unsent, self._unsent = sorted(self._unsent), set[str]()
        for name in unsent:
            optimizer = self._optimizers[name]
            for variable, slots in optimizer.slots.items():
                full = [f"{variable}:{slot}" for slot in slots]
                for slot, value in zip(full, self._store.pull(full), strict=True):
                    self._client.client.assign(slot, value)
            for key, value in self._scalars_of(name).items():
                if value.dtype.kind == "f" and value != optimizer.seen[key]:
                    self._client.client.set_scalar(stored_name(name, key), value)
                    optimizer.seen[key] = value
