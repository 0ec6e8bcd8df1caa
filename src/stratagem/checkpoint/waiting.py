"""Objects of a checkpoint some of whose variables are not there yet when it is restored."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import keras

from stratagem.checkpoint.creation import (
    call_after,
    infers_shapes,
    is_in_step,
    layers_of,
    when_initialized,
)
from stratagem.checkpoint.matching import METRICS, OPTIMIZER, match
from stratagem.checkpoint.objects import Part, build_optimizer, model_groups, part_by_path
from stratagem.execution.tracing.created_variables import is_uninitialized

__all__ = ["Waiting", "waits"]

_WEIGHTS = "weights"

Give = Callable[[Part, Mapping[str, str]], None]
_Plan = list[tuple[Part, dict[str, str]]]


def waits(value: Any, entries: Sequence[Mapping[str, Any]]) -> bool:
    """True if an object may still create variables.

    Args:
        value: of any kind.
        entries: what was saved of it.
    """
    if isinstance(value, keras.Layer):
        saved = {str(entry["path"]).split("/")[0] for entry in entries}
        has_optimizer = getattr(value, "optimizer", None) is not None
        is_uncompiled = isinstance(value, keras.Model) and not has_optimizer
        return not _is_built(value) or (is_uncompiled and OPTIMIZER in saved)
    if isinstance(value, keras.optimizers.Optimizer):
        return not value.built
    return isinstance(value, keras.metrics.Metric) and len(value.variables) < len(entries)


class Waiting:
    """An object that gets its values as its variables come into being.

    A model's weights come together, then its optimizer's variables.

    Args:
        name: what the checkpoint calls it.
        value: a model, layer, optimizer or metric.
        entries: path and shape of what was saved of it.
        where: the checkpoint, for messages.
        give: called with variables that are there and where to find their values.
        is_over: returns whether another restore has come since.
    """

    def __init__(
        self,
        name: str,
        value: Any,
        entries: Sequence[Mapping[str, Any]],
        where: str,
        give: Give,
        is_over: Callable[[], bool],
    ) -> None:
        self.name, self._value, self._entries, self._where = name, value, entries, where
        self._give, self._is_over = give, is_over
        self._hooked: set[tuple[int, str]] = set()
        self._left = {_WEIGHTS}
        if isinstance(value, keras.Model) and self._count(OPTIMIZER):
            self._left.add(OPTIMIZER)

    @property
    def is_done(self) -> bool:
        """True if no variable is missing or expected."""
        return not self._left

    def plan(self) -> _Plan:
        """Returns which variables can get their values now.

        Raises:
            ValueError: there are other variables than were saved, or one has another shape.
        """
        planned: _Plan = []
        for group in sorted(self._left, reverse=True):
            part = self._weights() if group == _WEIGHTS else self._slots()
            if part is not None:
                planned.append((part, match(part, self._entries, self._where)))
                self._left.discard(group)
        return planned

    def carry_out(self, planned: _Plan) -> None:
        """Gives variables their values, and watches for those that are still to come."""
        variables = [one for part, _ in planned for one in part.variables.values()]

        def give() -> None:
            for part, found in planned:
                self._give(part, found)

        if planned and is_in_step() and not any(map(is_uninitialized, variables)):
            # They were there before the step, which reads what they have when it is run.
            with jax.ensure_compile_time_eval():
                give()
        elif planned:
            when_initialized(variables, give)
        self._begin_optimizer()
        for owner, method in self._owners():
            if (id(owner), method) not in self._hooked:
                self._hooked.add((id(owner), method))
                call_after(owner, method, functools.partial(self._advance, owner))

    def _advance(self, owner: Any) -> bool:
        """Goes on after something has come into being; returns whether that was all."""
        if self._left and not self._is_over():
            try:
                planned = self.plan()
            except ValueError:
                if owner is self._value or not infers_shapes():
                    raise
                return False  # Keras would pass over it; the whole is built next
            self.carry_out(planned)
        return not self._left or self._is_over()

    def _count(self, *groups: str) -> int:
        return sum(
            str(entry["path"]).startswith(f"{group}/")
            for entry in self._entries
            for group in groups
        )

    def _weights(self) -> Part | None:
        """The object without a model's optimizer and metrics, if it is complete."""
        value = self._value
        if isinstance(value, keras.Model):
            groups = model_groups(value)
            kept = {
                name: list(group)
                for name, group in groups.items()
                if name not in (OPTIMIZER, METRICS)
            }
            is_there = _is_built(value) or (
                _may_be_built(value)
                and all(len(group) == self._count(name) for name, group in kept.items())
            )
            part = part_by_path(self.name, "model", kept)
            # What is too much stays too much.
            return part if is_there or len(part.variables) > self._count(*kept) else None
        part = part_by_path(self.name, _kind(value), {"": value.variables})
        count = len(part.variables)
        if isinstance(value, keras.Layer):
            is_there = _is_built(value) or (_may_be_built(value) and count == len(self._entries))
        elif isinstance(value, keras.optimizers.Optimizer):
            is_there = value.built
        else:
            is_there = count == len(self._entries)
        return part if is_there or count > len(self._entries) else None

    def _slots(self) -> Part | None:
        """A model's optimizer, if it is built or can be."""
        optimizer = self._optimizer()
        if optimizer is None or _WEIGHTS in self._left:
            return None
        if not optimizer.built:
            if is_in_step() or any(map(is_uninitialized, self._value.variables)):
                return None
            build_optimizer(optimizer, self._value)
        return part_by_path(self.name, "model", {OPTIMIZER: optimizer.variables})

    def _optimizer(self) -> Any:
        if isinstance(self._value, keras.Model):
            return getattr(self._value, "optimizer", None) if OPTIMIZER in self._left else None
        return self._value if isinstance(self._value, keras.optimizers.Optimizer) else None

    def _begin_optimizer(self) -> None:
        """Gives an optimizer the count of its steps, which is there before it is built."""
        optimizer = self._optimizer()
        if optimizer is None or optimizer.built or not self._left or is_in_step():
            return
        group = OPTIMIZER if optimizer is not self._value else ""
        part = part_by_path(self.name, "optimizer", {group: optimizer.variables})
        shapes = {str(entry["path"]): tuple(entry["shape"]) for entry in self._entries}
        found: dict[str, str] = {}
        for path, variable in part.variables.items():
            own, there = (
                [p for p in paths if p.startswith(group) and _last(p) == _last(path)]
                for paths in (part.variables, shapes)
            )
            saved = (
                path
                if path in shapes
                else there[own.index(path)]
                if len(own) == len(there)
                else None
            )
            if saved is not None and tuple(variable.shape) == shapes[saved]:
                found[path] = saved
        if found:
            self._give(part, found)

    def _owners(self) -> Iterable[tuple[Any, str]]:
        """Objects whose methods create the missing variables."""
        value = self._value
        if not self._left:
            return
        if isinstance(value, keras.metrics.Metric):
            yield value, "add_variable"
        if isinstance(value, keras.Layer) and _WEIGHTS in self._left:
            yield from ((layer, "build") for layer in layers_of(value) if not layer.built)
        if isinstance(value, keras.Model) and OPTIMIZER in self._left:
            yield value, "compile"
        optimizer = self._optimizer()
        if optimizer is not None and not optimizer.built:
            yield optimizer, "build"


def _is_built(layer: Any) -> bool:
    return all(one.built for one in layers_of(layer))


def _may_be_built(layer: Any) -> bool:
    """True if a layer is built, apart from sublayers that it may not use."""
    inner = layers_of(layer)[1:]
    return layer.built or (bool(inner) and all(one.built for one in inner))


def _kind(value: Any) -> str:
    if isinstance(value, keras.Layer):
        return "layer"
    return "optimizer" if isinstance(value, keras.optimizers.Optimizer) else "metric"


def _last(path: str) -> str:
    return path.rpartition("/")[2]
