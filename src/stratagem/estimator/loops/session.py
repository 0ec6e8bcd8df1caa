"""The loop around a step, as hooks see it."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from typing import Any

import jax
import keras
import numpy as np

from stratagem.estimator.hooks import (
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
)
from stratagem.estimator.loops.training_part import TrainingPart
from stratagem.estimator.spec import EstimatorSpec
from stratagem.estimator.steps.checkpoints import ModelCheckpoints
from stratagem.estimator.steps.model_step import ModelStep, hooks_of
from stratagem.estimator.steps.variable_store import GLOBAL_STEP
from stratagem.messages import explain

__all__ = ["HookedLoop", "ModelSession"]


class ModelSession:
    """What hooks get as `session`: values of the last step, and the means to save.

    Args:
        step: the step that the loop runs.
        spec: what the model function returned for it; its hooks hold values of that call.
        checkpoints: of the step's variables.
        model_dir: the folder of checkpoints and summaries.
        summary_writer: of that folder; None off the chief.
        part: of this process, of the training; None for what each process does by itself.
    """

    def __init__(
        self,
        step: ModelStep,
        spec: EstimatorSpec,
        checkpoints: ModelCheckpoints,
        model_dir: str,
        summary_writer: Any = None,
        part: TrainingPart | None = None,
    ) -> None:
        self.mode = step.mode
        self.model_dir = model_dir
        self._part = TrainingPart(step.strategy) if part is None else part
        self.is_chief = self._part.is_chief
        self.num_workers = self._part.num_workers
        self._step = step
        self._spec = spec
        self._checkpoints = checkpoints
        self._summary_writer = summary_writer
        self._global_step = 0
        self._values: dict[str, Any] | None = None
        self.read_global_step()

    @property
    def global_step(self) -> int:
        """How many steps the model has been trained, the last finished one included."""
        return self._global_step

    @property
    def summary_writer(self) -> Any:
        """The writer of `model_dir`; None on all processes but the chief."""
        return self._summary_writer

    def read_global_step(self) -> None:
        """Asks the variable, which has been restored; from then on steps are counted here."""
        self._global_step = int(self._step.store.global_step)

    def finish_step(self, values: dict[str, Any], *, num_trained: int) -> None:
        """Takes over what a step has given.

        Args:
            values: what hooks may fetch of it, still on the devices.
            num_trained: steps of training that it was.
        """
        self._values = values
        if num_trained and self._part.counts_all:
            self.read_global_step()
        else:
            self._global_step += num_trained

    def save_checkpoint(self) -> str:
        """Saves what was trained. Call on every process.

        Returns:
            The path of the checkpoint; of the latest one where another process saves by itself, ""
            before the first.
        """
        return self._checkpoints.save() if self._part.saves else self._checkpoints.latest or ""

    def run(self, fetches: Any) -> Any:
        """Returns values of the last finished step, and waits for it if it has not ended.

        Args:
            fetches: a structure of names, variables, and values of the model function.

        Returns:
            The same structure of NumPy values.

        Raises:
            ValueError: a name or value that nobody knows, or one of a step before the first.
        """
        return jax.tree.map(self._fetch, fetches)

    def _fetch(self, wanted: Any) -> Any:
        if isinstance(wanted, str):
            return self._of_name(wanted.removesuffix(":0"))
        if isinstance(wanted, keras.Variable):
            if wanted is self._step.store.global_step:
                return np.int32(self._global_step)
            return np.asarray(wanted.value)
        if wanted is self._spec.loss:
            return self._on_host(self._of_step("loss")["loss"])
        for place, hook in enumerate(hooks_of(self._spec, self.mode)):
            for name, value in dict(getattr(hook, "tensors", None) or {}).items():
                if value is wanted:
                    return self._on_host(self._of_step(name)["held"][place][name])
        raise _unknown(wanted, self._names())

    def _of_name(self, name: str) -> Any:
        if name == GLOBAL_STEP:
            return np.int32(self._global_step)
        variable = self._step.store.find(name)
        if variable is not None:
            return np.asarray(variable.value)
        if name == "loss" and self._spec.loss is not None:
            return self._on_host(self._of_step(name)["loss"])
        values = self._of_step(name)["named"]
        if name not in values:
            raise _unknown(name, self._names())
        return self._on_host(values[name])

    def _of_step(self, name: str) -> dict[str, Any]:
        if self._values is None:
            raise ValueError(
                explain(
                    f"A hook asked for {name!r} before the first step.",
                    expected="names of variables until then.",
                    fix="ask in before_run or after_run.",
                )
            )
        return self._values

    def _names(self) -> list[str]:
        of_step = [] if self._values is None else [*self._values["named"]]
        return sorted({"loss", GLOBAL_STEP, *of_step, *self._step.store.named})

    def _on_host(self, value: Any) -> Any:
        return np.asarray(self._step.strategy.local_results(value)[0])


def _unknown(wanted: Any, names: list[str]) -> ValueError:
    return ValueError(
        explain(
            f"A hook asked for {wanted!r}, which no step gives.",
            expected=f"a variable, a value in the hook's own `tensors`, or one of {names}.",
            fix="name it in the model function: sg.estimator.identity(value, name=...).",
        )
    )


class _Step:
    """A step that hooks are called around."""

    def __init__(self, session: ModelSession, context: SessionRunContext) -> None:
        self._session = session
        self._context = context

    def finish(self, values: dict[str, Any], *, num_trained: int = 0) -> None:
        """Hands over what the step has given, for the hooks.

        Args:
            values: as of `ModelSession.finish_step`.
            num_trained: likewise.
        """
        self._session.finish_step(values, num_trained=num_trained)

    @property
    def stop_requested(self) -> bool:
        """Whether a hook asks for the end."""
        return self._context.stop_requested


class HookedLoop:
    """Calls hooks around steps.

    Args:
        session: what they are told of.
        hooks: in the order in which they are called.
    """

    def __init__(self, session: ModelSession, hooks: Sequence[SessionRunHook]) -> None:
        self._session = session
        self._hooks = list(hooks)

    def begin(self) -> None:
        """Tells the hooks, before variables are restored."""
        for hook in self._hooks:
            hook.begin()

    def create_session(self) -> None:
        """Tells the hooks that the variables have their values."""
        for hook in self._hooks:
            hook.after_create_session(self._session, None)

    @contextlib.contextmanager
    def step(self) -> Generator[_Step]:
        """Calls the hooks before and after a `with` block, which runs a step.

        Yields:
            What is to be told of the step, and whether a hook asks for the end.
        """
        context = SessionRunContext(SessionRunArgs(None), self._session)
        wanted = [hook.before_run(context) for hook in self._hooks]
        yield _Step(self._session, context)
        for hook, args in zip(self._hooks, wanted, strict=True):
            fetched = None if args is None else self._session.run(args.fetches)
            hook.after_run(context, SessionRunValues(fetched))

    def end(self) -> None:
        """Tells the hooks that the loop has ended without an error."""
        for hook in self._hooks:
            hook.end(self._session)
