"""The models in PyTorch, layer by layer those of `keras_models`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from benchmarks.workloads import MLP_SIZES, WORKLOADS

__all__ = ["build_model"]


def build_model(name: str) -> nn.Module:
    torch.manual_seed(0)
    workload = WORKLOADS[name]
    if name == "mlp":
        return _mlp()
    if name == "cnn":
        return _cnn(workload.num_classes)
    assert name == "transformer", f"{name} is not among the models in PyTorch"
    return _Transformer(workload.num_tokens, workload.num_classes)


def _mlp() -> nn.Module:
    first, second, third, last = MLP_SIZES
    return nn.Sequential(
        nn.Linear(first, second),
        nn.ReLU(),
        nn.Linear(second, third),
        nn.ReLU(),
        nn.Linear(third, last),
    )


def _cnn(num_classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 5 * 5, num_classes),
    ).to(memory_format=torch.channels_last)  # what oneDNN is fastest with


class _Transformer(nn.Module):
    def __init__(self, num_tokens: int, num_classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_tokens, 64)
        block = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        self.head = nn.Linear(64, num_classes)

    def forward(self, tokens: Any) -> Any:
        return self.head(self.blocks(self.embedding(tokens)).mean(dim=1))
