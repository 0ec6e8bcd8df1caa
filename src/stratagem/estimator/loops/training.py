"""The training loop of an Estimator."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from stratagem.estimator.hooks import SessionRunHook
from stratagem.estimator.loops.placed_model import PlacedModel
from stratagem.estimator.loops.session import HookedLoop, ModelSession
from stratagem.estimator.loops.training_summaries import TrainingSummaries
from stratagem.estimator.spec import EstimatorSpec

__all__ = ["train"]


def train(
    model: PlacedModel,
    batches: Any,
    *,
    model_dir: str,
    initialize: Callable[[], bool],
    make_hooks: Callable[[EstimatorSpec], Sequence[SessionRunHook]],
    last_step: Callable[[int], int | None],
    wait_limit_s: float,
    summaries: TrainingSummaries,
) -> None:
    """Trains until the data or the steps end, or a hook asks for the end.

    Args:
        model: the model under the strategy.
        batches: of training, from its part.
        model_dir: the folder of checkpoints and summaries.
        initialize: gives the variables, which exist when it is called, their values; tells whether
            they are those of an earlier training.
        make_hooks: given what the model function returned, all hooks in their order.
        last_step: given the step that training begins with, the one that it ends with; None for the
            end of the data.
        wait_limit_s: how long to wait for another process that makes the variables.
        summaries: of the steps.
    """
    with contextlib.closing(batches), summaries.written():
        first = batches.first()
        model.part.wait(wait_limit_s)
        spec = model.training.prepare(first)
        session = ModelSession(
            model.training, spec, model.checkpoints, model_dir, summaries.writer, model.part
        )
        loop = HookedLoop(session, make_hooks(spec))
        loop.begin()
        goes_on = model.part.begin(initialize)
        session.read_global_step()
        if spec.scaffold is not None and not goes_on:
            spec.scaffold.init_fn(session)
        loop.create_session()
        end = last_step(session.global_step)
        # zip asks for the batch last: none is taken that is not trained on.
        for _, batch in zip(_steps_until(end, session), batches.after(first), strict=False):
            model.checkpoints.forget()
            with loop.step() as step:
                with summaries.of_step(session.global_step + 1):
                    values = model.part.run(model.training, batch)
                step.finish(values, num_trained=1)
            if step.stop_requested:
                break
        if (values := model.part.finish()) is not None:
            session.finish_step(values, num_trained=0)
            session.read_global_step()
        loop.end()


def _steps_until(end: int | None, session: ModelSession) -> Iterator[None]:
    """An element for each step before the end: others may make some of them, and later."""
    start = session.global_step
    for made in itertools.count():
        if end is not None and max(session.global_step, start + made) >= end:
            return
        yield
