"""The training loop of an Estimator."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence

from stratagem.estimator.batches import ModelBatches
from stratagem.estimator.hooks import SessionRunHook
from stratagem.estimator.placed_model import PlacedModel
from stratagem.estimator.session import HookedLoop, ModelSession
from stratagem.estimator.spec import EstimatorSpec
from stratagem.estimator.training_summaries import TrainingSummaries

__all__ = ["train"]


def train(
    model: PlacedModel,
    batches: ModelBatches,
    *,
    model_dir: str,
    initialize: Callable[[], bool],
    make_hooks: Callable[[EstimatorSpec], Sequence[SessionRunHook]],
    last_step: Callable[[int], int | None],
    summaries: TrainingSummaries,
) -> None:
    """Trains until the data or the steps end, or a hook asks for the end.

    Args:
        model: the model under the strategy.
        batches: of training.
        model_dir: the folder of checkpoints and summaries.
        initialize: gives the variables, which exist when it is called, their values; tells whether
            they are those of an earlier training.
        make_hooks: given what the model function returned, all hooks in their order.
        last_step: given the step that training begins with, the one that it ends with; None for the
            end of the data.
        summaries: of the steps.
    """
    with contextlib.closing(batches), summaries.written():
        first = batches.first()
        spec = model.training.prepare(first)
        session = ModelSession(model.training, spec, model.checkpoints, model_dir, summaries.writer)
        loop = HookedLoop(session, make_hooks(spec))
        loop.begin()
        goes_on = initialize()
        session.read_global_step()
        if spec.scaffold is not None and not goes_on:
            spec.scaffold.init_fn(session)
        loop.create_session()
        end = last_step(session.global_step)
        left = itertools.count() if end is None else range(end - session.global_step)
        # zip asks for the batch last: none is taken that is not trained on.
        for _, batch in zip(left, itertools.chain([first], batches), strict=False):
            model.checkpoints.forget()
            with loop.step() as step:
                with summaries.of_step(session.global_step + 1):
                    values = model.training.run(batch)
                step.finish(values, num_trained=1)
            if step.stop_requested:
                break
        loop.end()
