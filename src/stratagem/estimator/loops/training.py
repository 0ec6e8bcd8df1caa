"""Training loop of an Estimator."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from stratagem.estimator.hooks.session_run_hook import SessionRunHook
from stratagem.estimator.loops.distributed_model import DistributedModel
from stratagem.estimator.loops.session import HookedLoop, ModelSession
from stratagem.estimator.loops.training_summaries import TrainingSummaries
from stratagem.estimator.settings.run_config import RunConfig
from stratagem.estimator.spec import EstimatorSpec

if TYPE_CHECKING:
    from stratagem.estimator.loops.batches import ModelBatches
    from stratagem.estimator.loops.coordinated_training import ScheduledBatches


def train(
    model: DistributedModel,
    batches: ModelBatches | ScheduledBatches,
    config: RunConfig,
    *,
    initialize: Callable[[], bool],
    make_hooks: Callable[[EstimatorSpec], Sequence[SessionRunHook]],
    last_step: Callable[[int], int | None],
) -> None:
    """Trains until the data or the steps run out, or a hook requests a stop.

    `initialize` sets the variables and returns True if they come from a checkpoint. `last_step`
    maps the first global step to the last one, or None if unlimited.
    """
    folder = config.model_dir
    assert folder is not None
    summaries = TrainingSummaries(folder, config.save_summary_steps if model.role.saves else None)
    with contextlib.closing(batches), summaries.written():
        first = batches.first()
        model.role.wait(config.session_creation_timeout_secs)
        spec = model.training.prepare(first)
        session = ModelSession(
            model.training, spec, model.checkpoints, folder, summaries.writer, model.role
        )
        loop = HookedLoop(session, make_hooks(spec))
        loop.begin()
        resumes = model.role.begin(initialize)
        session.read_global_step()
        if spec.scaffold is not None and not resumes:
            spec.scaffold.init_fn(session)
        loop.create_session()
        end = last_step(session.global_step)
        # zip reads the batch last, so no batch is consumed without being trained on.
        for _, batch in zip(_steps_until(end, session), batches.after(first), strict=False):
            model.checkpoints.forget()
            with loop.step() as context:
                with summaries.of_step(session.global_step + 1):
                    values = model.role.run(model.training, batch)
                session.finish_step(values, num_trained=1)
            if context.stop_requested:
                break
        if (values := model.role.finish()) is not None:
            session.finish_step(values)
            session.read_global_step()
        loop.end()


def _steps_until(end: int | None, session: ModelSession) -> Iterator[None]:
    """Yields once per step before `end`; other workers may also count steps."""
    start = session.global_step
    for num_steps in itertools.count():
        if end is not None and max(session.global_step, start + num_steps) >= end:
            return
        yield
