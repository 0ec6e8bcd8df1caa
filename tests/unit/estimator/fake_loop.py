"""Fake loop that calls hooks in TensorFlow's order, without a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from stratagem.estimator.hooks import (
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
)


class FakeClock:
    """Clock that a test sets."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def passing(self, seconds: float) -> Callable[..., None]:
        """Returns a function that lets so many seconds pass."""

        def let_pass(*_: object) -> None:
            self.now_s += seconds

        return let_pass


class FakeSession:
    """Fake session of a loop."""

    def __init__(
        self,
        model_dir: str = "model",
        *,
        global_step: int = 0,
        values: Callable[[str, int], Any] = lambda name, step: step,
        on_step: Callable[[int], Any] = lambda step: None,
    ) -> None:
        self.mode = "train"
        self.model_dir = model_dir
        self.is_chief = True
        self.num_workers = 1
        self.global_step = global_step
        self.summary_writer: Any = None
        self.saved: list[int] = []
        self.fetched: list[tuple[int, Any]] = []
        self._values = values
        self._on_step = on_step

    def run(self, fetches: Any) -> Any:
        self.fetched.append((self.global_step, fetches))
        return jax.tree.map(lambda name: self._values(name, self.global_step), fetches)

    def save_checkpoint(self) -> str:
        self.saved.append(self.global_step)
        return f"{self.model_dir}/model.ckpt-{self.global_step}"

    def loop(self, hooks: Sequence[SessionRunHook], num_steps: int) -> int:
        """Runs until a hook requests a stop and returns the number of steps."""
        for hook in hooks:
            hook.begin()
        for hook in hooks:
            hook.after_create_session(self, None)
        done = 0
        while done < num_steps:
            context = SessionRunContext(SessionRunArgs(None), self)
            asked = [hook.before_run(context) for hook in hooks]
            done += 1
            self.global_step += 1
            self._on_step(self.global_step)
            for hook, args in zip(hooks, asked, strict=True):
                results = None if args is None else self.run(args.fetches)
                hook.after_run(context, SessionRunValues(results))
            if context.stop_requested:
                break
        for hook in hooks:
            hook.end(self)
        return done
