"""Peer: Hugging Face's Trainer with a Llama of Transformers."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.gpu.models import GpuModel
from benchmarks.gpu.options import SideOptions
from benchmarks.gpu.workers.measurement import Training, measure
from benchmarks.gpu.workers.torch_device import device_kind, peak_bytes, prepare_torch
from benchmarks.gpu.workers.torch_llama import build_llama, trained

__all__ = ["prepare"]


class _Sequences(torch.utils.data.Dataset[dict[str, Any]]):
    """Tokens that are their own labels: the model shifts them."""

    def __init__(self, tokens: Any) -> None:
        self.tokens = torch.from_numpy(tokens).long()

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


class _Clock(transformers.TrainerCallback):
    """Takes the time from the first step to the last: each `train` prepares anew before."""

    def __init__(self) -> None:
        self._begun_s, self.steps_s = 0.0, 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 0:
            self._begun_s = _now_s()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.steps_s = _now_s() - self._begun_s


def _now_s() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def prepare(options: SideOptions, model: GpuModel) -> Training:
    device = prepare_torch()
    network = build_llama(model, device)
    tokens, _ = model.arrays()
    settings: dict[str, Any] = {
        "output_dir": str(Path(options.folder) / "trainer"),
        "per_device_train_batch_size": model.batch_size,
        "gradient_accumulation_steps": options.accumulation,
        "learning_rate": model.learning_rate,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,  # no side clips
        "optim": "adamw_torch_fused" if device.type == "cuda" else "adamw_torch",
        "bf16": True,
        "use_cpu": device.type == "cpu",
        "torch_compile": bool(options.compiled),
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    clock = _Clock()
    trainer: Any = transformers.Trainer(
        model=network,
        args=transformers.TrainingArguments(**settings),
        train_dataset=_Sequences(tokens),
        callbacks=[clock],
    )

    def train(*, num_epochs: float = 1, max_steps: int = -1) -> float:
        trainer.args.num_train_epochs, trainer.args.max_steps = num_epochs, max_steps
        return float(trainer.train().training_loss)

    return Training(
        first_call=lambda: train(max_steps=1),
        train=lambda num_epochs: train(num_epochs=num_epochs),
        device_kind=device_kind(device),
        num_parameters=sum(one.numel() for one in trained(network)),
        peak_bytes=peak_bytes,
        steps_s=lambda: clock.steps_s,
    )


if __name__ == "__main__":
    measure(prepare)
