"""Restores for objects with variables that are created after the restore."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import keras

from stratagem.checkpoint.creation_hooks import (
    call_after,
    infers_shapes,
    is_in_step,
    layers_of,
    when_initialized,
)
from stratagem.checkpoint.matching import METRICS, OPTIMIZER, match
from stratagem.checkpoint.objects import Part, build_optimizer, model_groups, part_by_path
from stratagem.execution.tracing.created_variables import is_uninitialized

_WEIGHTS = "weights"

Assign = Callable[[Part, Mapping[str, str]], None]
_Plan = list[tuple[Part, dict[str, str]]]


def may_create_variables(value: object, entries: Sequence[Mapping[str, Any]]) -> bool:
    """True if an object may still create variables that `entries`, its saved arrays, hold."""
    if isinstance(value, keras.Layer):
        saved = {str(entry["path"]).split("/")[0] for entry in entries}
        has_optimizer = getattr(value, "optimizer", None) is not None
        is_uncompiled = isinstance(value, keras.Model) and not has_optimizer
        return not _is_built(value) or (is_uncompiled and OPTIMIZER in saved)
    if isinstance(value, keras.optimizers.Optimizer):
        return not value.built
    return isinstance(value, keras.metrics.Metric) and len(value.variables) < len(entries)


class DeferredRestore:
    """Restores an object as its variables are created: first the weights, then the optimizer's.

    `entries` holds path and shape of its saved arrays, and `where` describes the checkpoint in
    messages. `is_over` returns True once another restore has replaced this one.
    """

    def __init__(
        self,
        name: str,
        value: Any,
        entries: Sequence[Mapping[str, Any]],
        where: str,
        assign: Assign,
        is_over: Callable[[], bool],
    ) -> None:
        self.name, self._value, self._entries, self._where = name, value, entries, where
        self._assign, self._is_over = assign, is_over
        self._hooked: set[tuple[int, str]] = set()
        self._left = {_WEIGHTS}
        if isinstance(value, keras.Model) and self._count(OPTIMIZER):
            self._left.add(OPTIMIZER)

    @property
    def is_done(self) -> bool:
        """True if no variable is missing."""
        return not self._left

    def plan(self) -> _Plan:
        """Returns the variables that can be restored now; raises ValueError on a mismatch."""
        planned: _Plan = []
        for group in sorted(self._left, reverse=True):
            part = self._weights() if group == _WEIGHTS else self._optimizer_part()
            if part is not None:
                planned.append((part, match(part, self._entries, self._where)))
                self._left.discard(group)
        return planned

    def apply(self, planned: _Plan) -> None:
        """Restores the planned variables, and hooks the creation of those still missing."""
        variables = [one for part, _ in planned for one in part.variables.values()]

        def assign() -> None:
            for part, found in planned:
                self._assign(part, found)

        if planned and is_in_step() and not any(map(is_uninitialized, variables)):
            # The variables exist already; the step reads their values when it runs.
            with jax.ensure_compile_time_eval():
                assign()
        elif planned:
            when_initialized(variables, assign)
        self._restore_step_count()
        for owner, method in self._owners():
            if (id(owner), method) not in self._hooked:
                self._hooked.add((id(owner), method))
                call_after(owner, method, functools.partial(self._advance, owner))

    def _advance(self, owner: object) -> bool:
        """Continues after variables were created; returns True when nothing is left."""
        if self._left and not self._is_over():
            try:
                planned = self.plan()
            except ValueError:
                if owner is self._value or not infers_shapes():
                    raise
                return False  # Keras would ignore the error; the whole object is built next
            self.apply(planned)
        return not self._left or self._is_over()

    def _count(self, *groups: str) -> int:
        return sum(
            str(entry["path"]).startswith(f"{group}/")
            for entry in self._entries
            for group in groups
        )

    def _weights(self) -> Part | None:
        """Returns the object's weights, or None if they are incomplete."""
        value = self._value
        if isinstance(value, keras.Model):
            groups = model_groups(value)
            weights = {
                name: list(group)
                for name, group in groups.items()
                if name not in (OPTIMIZER, METRICS)
            }
            is_complete = _is_built(value) or (
                _may_be_built(value)
                and all(len(group) == self._count(name) for name, group in weights.items())
            )
            part = part_by_path(self.name, "model", weights)
            # Surplus variables cannot disappear: report them now.
            return part if is_complete or len(part.variables) > self._count(*weights) else None
        part = part_by_path(self.name, _kind(value), {"": value.variables})
        count = len(part.variables)
        if isinstance(value, keras.Layer):
            is_complete = _is_built(value) or (_may_be_built(value) and count == len(self._entries))
        elif isinstance(value, keras.optimizers.Optimizer):
            is_complete = value.built
        else:
            is_complete = count == len(self._entries)
        return part if is_complete or count > len(self._entries) else None

    def _optimizer_part(self) -> Part | None:
        """Returns a model's optimizer variables, or None if the optimizer cannot be built yet."""
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

    def _restore_step_count(self) -> None:
        """Restores an optimizer's step count, which exists before the optimizer is built."""
        optimizer = self._optimizer()
        if optimizer is None or optimizer.built or not self._left or is_in_step():
            return
        group = OPTIMIZER if optimizer is not self._value else ""
        part = part_by_path(self.name, "optimizer", {group: optimizer.variables})
        shapes = {str(entry["path"]): tuple(entry["shape"]) for entry in self._entries}
        found: dict[str, str] = {}
        for path, variable in part.variables.items():
            own, saved_paths = (
                [p for p in paths if p.startswith(group) and _last(p) == _last(path)]
                for paths in (part.variables, shapes)
            )
            saved = (
                path
                if path in shapes
                else saved_paths[own.index(path)]
                if len(own) == len(saved_paths)
                else None
            )
            if saved is not None and tuple(variable.shape) == shapes[saved]:
                found[path] = saved
        if found:
            self._assign(part, found)

    def _owners(self) -> Iterable[tuple[Any, str]]:
        """Yields objects and the methods that create their missing variables."""
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


def _is_built(layer: keras.layers.Layer) -> bool:
    return all(one.built for one in layers_of(layer))


def _may_be_built(layer: keras.layers.Layer) -> bool:
    """True if a layer is built, except for sublayers that it may not use."""
    inner = layers_of(layer)[1:]
    return layer.built or (bool(inner) and all(one.built for one in inner))


def _kind(value: object) -> str:
    if isinstance(value, keras.Layer):
        return "layer"
    return "optimizer" if isinstance(value, keras.optimizers.Optimizer) else "metric"


def _last(path: str) -> str:
    return path.rpartition("/")[2]
