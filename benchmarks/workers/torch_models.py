"""The models in PyTorch, layer by layer those of `keras_models`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn

from benchmarks.workloads import MLP_SIZES, TransformerSizes, Workload

_EPSILON = 1e-5


def build_model(workload: Workload) -> nn.Module:
    torch.manual_seed(0)
    make = {
        "mlp": _mlp,
        "cnn": _cnn,
        "transformer": _Classifier,
        "gpt": _Gpt,
        "resnet50": _resnet50,
    }
    return make[workload.kind](workload)


def _mlp(workload: Workload) -> nn.Module:
    first, second, third, last = MLP_SIZES
    return nn.Sequential(
        nn.Linear(first, second),
        nn.ReLU(),
        nn.Linear(second, third),
        nn.ReLU(),
        nn.Linear(third, last),
    )


def _cnn(workload: Workload) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 5 * 5, workload.num_classes),
    ).to(memory_format=torch.channels_last)  # what oneDNN is fastest with


class _Classifier(nn.Module):
    def __init__(self, workload: Workload) -> None:
        super().__init__()
        sizes = workload.transformer
        self.embedding = nn.Embedding(sizes.num_tokens, sizes.width)
        block = nn.TransformerEncoderLayer(
            sizes.width, sizes.num_heads, 2 * sizes.width, dropout=0.0, batch_first=True
        )
        self.blocks = nn.TransformerEncoder(block, sizes.num_blocks, enable_nested_tensor=False)
        self.head = nn.Linear(sizes.width, workload.num_classes)

    def forward(self, tokens: Any) -> Any:
        return self.head(self.blocks(self.embedding(tokens)).mean(dim=1))


class _Block(nn.Module):
    def __init__(self, sizes: TransformerSizes) -> None:
        super().__init__()
        width, self.num_heads = sizes.width, sizes.num_heads
        self.first_norm = nn.LayerNorm(width, eps=_EPSILON)
        self.inner, self.outer = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.second_norm = nn.LayerNorm(width, eps=_EPSILON)
        self.expand, self.contract = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Any) -> Any:
        x = x + self._attend(self.first_norm(x))
        return x + self.contract(F.gelu(self.expand(self.second_norm(x))))

    def _attend(self, x: Any) -> Any:
        batch, length, width = x.shape
        parts = self.inner(x).view(batch, length, 3, self.num_heads, width // self.num_heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.outer(attended.transpose(1, 2).reshape(batch, length, width))


class _Gpt(nn.Module):
    def __init__(self, workload: Workload) -> None:
        super().__init__()
        sizes = workload.transformer
        self.tokens = nn.Embedding(sizes.num_tokens, sizes.width)
        self.positions = nn.Parameter(torch.empty(sizes.length, sizes.width).uniform_(-0.05, 0.05))
        nn.init.uniform_(self.tokens.weight, -0.05, 0.05)  # Keras's
        self.blocks = nn.Sequential(*(_Block(sizes) for _ in range(sizes.num_blocks)))
        self.norm = nn.LayerNorm(sizes.width, eps=_EPSILON)

    def forward(self, tokens: Any) -> Any:
        x = self.norm(self.blocks(self.tokens(tokens) + self.positions))
        return x @ self.tokens.weight.T


def _resnet50(workload: Workload) -> nn.Module:
    """Keras's ResNet-50: its first convolution of a block has the stride, and all have biases."""
    groups: list[nn.Module] = []
    num_channels = 64
    for width, num_blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for place in range(num_blocks):
            groups.append(_Bottleneck(num_channels, width, stride if place == 0 else 1))
            num_channels = 4 * width
    return nn.Sequential(
        *([_Pixels()] if workload.input_dtype == "uint8" else []),
        *_convolution(3, 64, 7, stride=2),
        nn.ReLU(),
        nn.MaxPool2d(3, stride=2, padding=1),
        *groups,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(num_channels, workload.num_classes),
    ).to(memory_format=torch.channels_last)


class _Pixels(nn.Module):
    """Takes uint8 images with channels last, and normalizes them on the device."""

    def forward(self, pixels: Any) -> Any:
        # A view: the memory is that of channels_last.
        return pixels.permute(0, 3, 1, 2).float() / 255


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
