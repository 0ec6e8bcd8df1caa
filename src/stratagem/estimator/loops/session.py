"""Hooked loop and session: calls hooks around steps and fetches their values."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any

import jax
import keras
import numpy as np

from stratagem.errors import explain
from stratagem.estimator.hooks.session_run_hook import (
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
)
from stratagem.estimator.loops.training_role import TrainingRole
from stratagem.estimator.spec import EstimatorSpec
from stratagem.estimator.steps.model_step import ModelStep, spec_hooks
from stratagem.estimator.steps.variable_store import GLOBAL_STEP, ModelCheckpoints


class ModelSession:
    """Session passed to hooks: values of the last step, the global step and saving.

    `summary_writer` is None except on the chief. `role` is None outside training.
    """

    def __init__(
        self,
        step: ModelStep,
        spec: EstimatorSpec,
        checkpoints: ModelCheckpoints,
        model_dir: str,
        summary_writer: object = None,
        role: TrainingRole | None = None,
    ) -> None:
        self.mode = step.mode
        self.model_dir = model_dir
        self._role = TrainingRole(step.strategy) if role is None else role
        self.is_chief = self._role.is_chief
        self.num_workers = self._role.num_workers
        self._step = step
        self._spec = spec
        self._checkpoints = checkpoints
        self._summary_writer = summary_writer
        self._global_step = 0
        self._values: dict[str, Any] | None = None
        self.read_global_step()

    @property
    def global_step(self) -> int:
        """Number of steps trained, including the last finished one."""
        return self._global_step

    @property
    def summary_writer(self) -> Any:
        """Summary writer of `model_dir`; None except on the chief."""
        return self._summary_writer

    def read_global_step(self) -> None:
        """Reads the step variable after a restore; later steps are counted on the host."""
        self._global_step = int(self._step.store.global_step)

    def finish_step(self, values: dict[str, Any], *, num_trained: int = 0) -> None:
        """Stores the values of a finished step."""
        self._values = values
        if num_trained and self._role.counts_all:
            self.read_global_step()
        else:
            self._global_step += num_trained

    def save_checkpoint(self) -> str:
        """Saves all variables and returns the path. Call on every process."""
        return self._checkpoints.save() if self._role.saves else self._checkpoints.latest or ""

    def run(self, fetches: object) -> Any:
        """Returns values of the last finished step, waiting for it if necessary."""
        return jax.tree.map(self._fetch, fetches)

    def _fetch(self, wanted: object) -> Any:
        if isinstance(wanted, str):
            return self._fetch_name(wanted.removesuffix(":0"))
        if isinstance(wanted, keras.Variable):
            if wanted is self._step.store.global_step:
                return np.int32(self._global_step)
            return np.asarray(wanted.value)
        if wanted is self._spec.loss:
            return self._on_host(self._step_values("loss")["loss"])
        for index, hook in enumerate(spec_hooks(self._spec, self.mode)):
            for name, value in dict(getattr(hook, "tensors", None) or {}).items():
                if value is wanted:
                    return self._on_host(self._step_values(name)["held"][index][name])
        raise _unknown(wanted, self._names())

    def _fetch_name(self, name: str) -> Any:
        if name == GLOBAL_STEP:
            return np.int32(self._global_step)
        variable = self._step.store.find(name)
        if variable is not None:
            return np.asarray(variable.value)
        if name == "loss" and self._spec.loss is not None:
            return self._on_host(self._step_values(name)["loss"])
        values = self._step_values(name)["named"]
        if name not in values:
            raise _unknown(name, self._names())
        return self._on_host(values[name])

    def _step_values(self, name: str) -> dict[str, Any]:
        if self._values is None:
            raise ValueError(
                explain(
                    f"A hook fetched {name!r} before the first step.",
                    expected="names of variables before the first step.",
                    fix="fetch it in before_run or after_run.",
                )
            )
        return self._values

    def _names(self) -> list[str]:
        of_step = [] if self._values is None else [*self._values["named"]]
        return sorted({"loss", GLOBAL_STEP, *of_step, *self._step.store.named})

    def _on_host(self, value: object) -> Any:
        return np.asarray(self._step.strategy.local_results(value)[0])


def _unknown(wanted: object, names: list[str]) -> ValueError:
    return ValueError(
        explain(
            f"A hook fetched {wanted!r}, which the step does not return.",
            expected=f"a variable, a value in the hook's own `tensors`, or one of {names}.",
            fix="name it in the model function: sg.estimator.identity(value, name=...).",
        )
    )


class HookedLoop:
    """Calls hooks at the start, around each step and at the end."""

    def __init__(self, session: ModelSession, hooks: Sequence[SessionRunHook]) -> None:
        self._session = session
        self._hooks = list(hooks)

    def begin(self) -> None:
        """Calls the hooks' `begin`, before variables are restored."""
        for hook in self._hooks:
            hook.begin()

    def create_session(self) -> None:
        """Calls the hooks' `after_create_session`, once variables are initialized."""
        for hook in self._hooks:
            hook.after_create_session(self._session, None)

    @contextlib.contextmanager
    def step(self) -> Generator[SessionRunContext]:
        """Calls the hooks before and after the `with` block, which runs a step."""
        context = SessionRunContext(SessionRunArgs(None), self._session)
        wanted = [hook.before_run(context) for hook in self._hooks]
        yield context
        for hook, args in zip(self._hooks, wanted, strict=True):
            fetched = None if args is None else self._session.run(args.fetches)
            hook.after_run(context, SessionRunValues(fetched))

    def end(self) -> None:
        """Calls the hooks' `end`, unless the loop failed."""
        for hook in self._hooks:
            hook.end(self._session)


# Evaluation and prediction loop of an Estimator, with hooks.


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
