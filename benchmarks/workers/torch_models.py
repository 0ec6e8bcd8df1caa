"""The models in PyTorch, layer by layer those of `keras_models`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from benchmarks.workloads import MLP_SIZES, WORKLOADS, Workload

__all__ = ["build_model"]


def build_model(name: str) -> nn.Module:
    torch.manual_seed(0)
    workload = WORKLOADS[name]
    if name == "mlp":
        return _mlp()
    if name == "cnn":
        return _cnn(workload.num_classes)
    if name == "bert":
        return _Bert(workload)
    if name == "gpt2":
        return _Gpt2(workload)
    if name == "small_resnet50":
        return _resnet50(workload.num_classes)
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


# Those of `keras_models`: width, heads, width of the feed-forward layers, blocks.
_WIDTH, _NUM_HEADS, _FEED_FORWARD_WIDTH, _NUM_BLOCKS = 256, 4, 1024, 12


def _blocks(*, norm_first: bool) -> nn.Module:
    block = nn.TransformerEncoderLayer(
        _WIDTH,
        _NUM_HEADS,
        _FEED_FORWARD_WIDTH,
        dropout=0.0,
        activation="gelu",
        batch_first=True,
        norm_first=norm_first,
    )
    return nn.TransformerEncoder(block, _NUM_BLOCKS, enable_nested_tensor=False)


class _Embedding(nn.Module):
    """A vector of each token and one of its position."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        (length,) = workload.input_shape
        self.tokens = nn.Embedding(workload.num_tokens, _WIDTH)
        self.positions = nn.Parameter(torch.empty(length, _WIDTH).uniform_(-0.05, 0.05))

    def forward(self, tokens: Any) -> Any:
        return self.tokens(tokens) + self.positions


class _Bert(nn.Module):
    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.embedding = nn.Sequential(_Embedding(workload), nn.LayerNorm(_WIDTH))
        self.blocks = _blocks(norm_first=False)
        self.pooler = nn.Linear(_WIDTH, _WIDTH)
        self.head = nn.Linear(_WIDTH, workload.num_classes)

    def forward(self, tokens: Any) -> Any:
        x = self.blocks(self.embedding(tokens))
        return self.head(torch.tanh(self.pooler(x[:, 0])))


class _Gpt2(nn.Module):
    def __init__(self, workload: Workload) -> None:
        super().__init__()
        (length,) = workload.input_shape
        self.embedding = _Embedding(workload)
        self.blocks = _blocks(norm_first=True)
        self.norm = nn.LayerNorm(_WIDTH)
        self.head = nn.Linear(_WIDTH, workload.num_classes, bias=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))

    def forward(self, tokens: Any) -> Any:
        x = self.blocks(self.embedding(tokens), mask=self.mask, is_causal=True)
        return self.head(self.norm(x))


def _resnet50(num_classes: int) -> nn.Module:
    """Keras's ResNet-50: its first convolution of a block has the stride, and all have biases."""
    groups: list[nn.Module] = []
    num_channels = 64
    for width, num_blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for place in range(num_blocks):
            groups.append(_Bottleneck(num_channels, width, stride if place == 0 else 1))
            num_channels = 4 * width
    return nn.Sequential(
        *_convolution(3, 64, 7, stride=2),
        nn.ReLU(),
        nn.MaxPool2d(3, stride=2, padding=1),
        *groups,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(num_channels, num_classes),
    ).to(memory_format=torch.channels_last)


def _convolution(num_in: int, num_out: int, size: int, stride: int = 1) -> list[nn.Module]:
    convolution = nn.Conv2d(num_in, num_out, size, stride=stride, padding=size // 2)
    return [convolution, nn.BatchNorm2d(num_out, eps=1.001e-5)]


class _Bottleneck(nn.Module):
    def __init__(self, num_in: int, width: int, stride: int) -> None:
        super().__init__()
        num_out = 4 * width
        is_changed = stride > 1 or num_in != num_out
        self.shortcut = nn.Sequential(
            *(_convolution(num_in, num_out, 1, stride) if is_changed else [])
        )
        self.layers = nn.Sequential(
            *_convolution(num_in, width, 1, stride),
            nn.ReLU(),
            *_convolution(width, width, 3),
            nn.ReLU(),
            *_convolution(width, num_out, 1),
        )

    def forward(self, x: Any) -> Any:
        return torch.relu(self.shortcut(x) + self.layers(x))
