"""Fake Estimator that only counts training steps."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stratagem.estimator.estimator import Estimator
from stratagem.estimator.hooks import StopAtStepHook
from stratagem.estimator.loops import write_eval_metrics
from stratagem.estimator.run_config import RunConfig
from stratagem.estimator.saving_hooks import CheckpointSaverHook
from tests.unit.estimator.fake_loop import FakeSession


def in_cluster(monkeypatch: Any, task_type: str, index: int = 0, **jobs: int) -> None:
    """Makes this process a task of a cluster with so many tasks of each job."""
    cluster = {job: [f"{job}{i}:1" for i in range(number)] for job, number in jobs.items()}
    task = {"type": task_type, "index": index}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": task}))


class FakeEstimator(Estimator):
    """Estimator with given losses per step; its checkpoints are files that contain the step."""

    config: Any = None
    model_dir: Any = None

    def __init__(
        self,
        model_dir: Path,
        *,
        loss: Callable[[int], float] = lambda step: 1 / (step + 1),
        save_steps: int = 10,
        on_step: Callable[[int], Any] = lambda step: None,
        num_steps_of_data: int = 10**6,
        config: RunConfig | None = None,
    ) -> None:
        self.config = RunConfig() if config is None else config
        self.model_dir = str(model_dir)
        self.evaluated: list[int] = []
        self.evaluations: list[dict[str, Any]] = []
        self.exports: list[dict[str, Any]] = []
        self.trained: list[dict[str, Any]] = []
        self.sessions: list[FakeSession] = []
        self._loss = loss
        self._save_steps = save_steps
        self._on_step = on_step
        self._num_steps_of_data = num_steps_of_data

    def train(self, input_fn, hooks=(), steps=None, max_steps=None, saving_listeners=()):
        self.trained.append({"input_fn": input_fn, "hooks": hooks, "max_steps": max_steps})
        latest = self.latest_checkpoint()
        start = 0 if latest is None else self._step_of(latest)
        if max_steps is not None and start >= max_steps:
            return self
        session = FakeSession(self.model_dir, global_step=start, on_step=self._on_step)
        session.save_checkpoint = lambda: self.write_checkpoint(session.global_step)
        self.sessions.append(session)
        saver = CheckpointSaverHook(
            self.model_dir, save_steps=self._save_steps, listeners=list(saving_listeners)
        )
        stop = [] if max_steps is None else [StopAtStepHook(last_step=max_steps)]
        session.loop([saver, *hooks, *stop], self._num_steps_of_data)
        return self

    def write_checkpoint(self, step: int) -> str:
        path = Path(self.model_dir) / f"model.ckpt-{step}"
        path.write_text(json.dumps({"step": step}))
        return str(path)

    def latest_checkpoint(self) -> str | None:
        found = Path(self.model_dir).glob("model.ckpt-*")
        return max(map(str, found), key=lambda path: int(path.rsplit("-", 1)[1]), default=None)

    def evaluate(self, input_fn, steps=None, hooks=(), checkpoint_path=None, name=None):
        step = self._step_of(checkpoint_path)
        self.evaluated.append(step)
        self.evaluations.append(
            {"input_fn": input_fn, "steps": steps, "hooks": hooks, "name": name}
        )
        metrics = {"loss": self._loss(step), "global_step": step}
        write_eval_metrics(self.eval_dir(name), metrics)
        return metrics

    def eval_dir(self, name: str | None = None) -> str:
        return str(Path(self.model_dir) / (f"eval_{name}" if name else "eval"))

    def export_saved_model(self, export_dir_base, serving_input_receiver_fn, **options) -> str:
        path = Path(export_dir_base) / str(1_700_000_000 + len(self.exports))
        path.mkdir(parents=True)
        self.exports.append({"path": path, "receiver_fn": serving_input_receiver_fn, **options})
        return str(path)

    @staticmethod
    def _step_of(path: str) -> int:
        return json.loads(Path(path).read_text())["step"]
