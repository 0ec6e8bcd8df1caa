"""Evaluation and prediction loop of an Estimator, with hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from stratagem.estimator.hooks.session_run_hook import SessionRunHook
from stratagem.estimator.loops.session import HookedLoop, ModelSession
from stratagem.estimator.steps.checkpoints import ModelCheckpoints
from stratagem.estimator.steps.model_step import ModelStep, spec_hooks


class InferenceLoop:
    """Loop of steps that don't train. Creating it traces the step for the first batch."""

    def __init__(
        self,
        step: ModelStep,
        first: tuple[Any, Any],
        checkpoints: ModelCheckpoints,
        model_dir: str,
        hooks: Sequence[SessionRunHook],
    ) -> None:
        self._step = step
        self.spec = step.prepare(first)
        self.session = ModelSession(step, self.spec, checkpoints, model_dir)
        self._loop = HookedLoop(self.session, [*hooks, *spec_hooks(self.spec, step.mode)])

    def run(
        self, batches: Iterable[tuple[Any, Any]], initialize: Callable[[], bool]
    ) -> Iterator[Any]:
        """Yields the values of each step, until the batches end or a hook requests a stop.

        `initialize` sets the variables and returns True if they come from a checkpoint.
        """
        self._loop.begin()
        if not initialize() and self.spec.scaffold is not None:
            self.spec.scaffold.init_fn(self.session)
        self.session.read_global_step()
        self._step.reset()
        self._loop.create_session()
        for batch in batches:
            with self._loop.step() as context:
                values = self._step.run(batch)
                self.session.finish_step(values)
            yield values
            if context.stop_requested:
                break
        self._loop.end()
