"""The models in PyTorch, layer by layer those of `keras_networks`."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn

from benchmarks.gpu.models import (
    BOTTOM_WIDTHS,
    NUM_DENSE,
    NUM_TABLES,
    ROW_SIZE,
    TOP_WIDTHS,
    GpuModel,
    TransformerSizes,
)
from benchmarks.workers.torch_models import build_model as build_benchmark_model
from benchmarks.workloads import mlp_weights

__all__ = ["build_model"]

_EPSILON = 1e-5


def build_model(model: GpuModel, table_device: str = "cpu") -> nn.Module:
    """Returns a model on the CPU, except for the tables of DLRM, which are on `table_device`."""
    torch.manual_seed(0)
    if model.kind == "mlp":
        return _mlp()
    if model.kind == "resnet50":
        return _Pixels(build_benchmark_model("small_resnet50"))
    if model.kind == "dlrm":
        return _Dlrm(model, table_device)
    assert model.transformer is not None
    if model.kind == "bert":
        return _Bert(model.transformer, model.num_classes)
    return _Gpt(model.transformer)


def _mlp() -> nn.Module:
    network = build_benchmark_model("mlp")
    weights = [torch.from_numpy(one.T.copy()) for one in mlp_weights()]
    for parameter, weight in zip(network.parameters(), weights, strict=True):
        parameter.data.copy_(weight)
    return network


class _Pixels(nn.Module):
    """Takes uint8 images with channels last, and normalizes them on the device."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, pixels: Any) -> Any:
        # A view: the memory is that of channels_last.
        return self.network(pixels.permute(0, 3, 1, 2).float() / 255)


class _Attention(nn.Module):
    def __init__(self, sizes: TransformerSizes, *, is_causal: bool) -> None:
        super().__init__()
        self.num_heads, self.is_causal = sizes.num_heads, is_causal
        self.inner = nn.Linear(sizes.width, 3 * sizes.width)
        self.outer = nn.Linear(sizes.width, sizes.width)

    def forward(self, x: Any) -> Any:
        batch, length, width = x.shape
        parts = self.inner(x).view(batch, length, 3, self.num_heads, width // self.num_heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=self.is_causal)
        return self.outer(attended.transpose(1, 2).reshape(batch, length, width))


class _Block(nn.Module):
    def __init__(self, sizes: TransformerSizes, *, is_causal: bool, norm_first: bool) -> None:
        super().__init__()
        self.norm_first = norm_first
        self.attention = _Attention(sizes, is_causal=is_causal)
        self.first_norm = nn.LayerNorm(sizes.width, eps=_EPSILON)
        self.second_norm = nn.LayerNorm(sizes.width, eps=_EPSILON)
        self.expand = nn.Linear(sizes.width, 4 * sizes.width)
        self.contract = nn.Linear(4 * sizes.width, sizes.width)

    def forward(self, x: Any) -> Any:
        if self.norm_first:
            x = x + self.attention(self.first_norm(x))
            return x + self._feed_forward(self.second_norm(x))
        x = self.first_norm(x + self.attention(x))
        return self.second_norm(x + self._feed_forward(x))

    def _feed_forward(self, x: Any) -> Any:
        return self.contract(F.gelu(self.expand(x)))


class _Transformer(nn.Module):
    """Embeddings and blocks."""

    def __init__(self, sizes: TransformerSizes, *, is_causal: bool, norm_first: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.num_tokens, sizes.width)
        self.positions = nn.Parameter(torch.empty(sizes.length, sizes.width).uniform_(-0.05, 0.05))
        nn.init.uniform_(self.tokens.weight, -0.05, 0.05)  # Keras's
        self.norm = nn.LayerNorm(sizes.width, eps=_EPSILON)
        self.blocks = nn.ModuleList(
            _Block(sizes, is_causal=is_causal, norm_first=norm_first)
            for _ in range(sizes.num_blocks)
        )

    def embed(self, tokens: Any) -> Any:
        return self.tokens(tokens) + self.positions


class _Bert(_Transformer):
    def __init__(self, sizes: TransformerSizes, num_classes: int) -> None:
        super().__init__(sizes, is_causal=False, norm_first=False)
        self.pooler = nn.Linear(sizes.width, sizes.width)
        self.head = nn.Linear(sizes.width, num_classes)

    def forward(self, tokens: Any) -> Any:
        x = self.norm(self.embed(tokens))
        for block in self.blocks:
            x = block(x)
        return self.head(torch.tanh(self.pooler(x[:, 0])))


class _Gpt(_Transformer):
    def __init__(self, sizes: TransformerSizes) -> None:
        super().__init__(sizes, is_causal=True, norm_first=True)

    def forward(self, tokens: Any) -> Any:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.tokens.weight.T


class _Dlrm(nn.Module):
    def __init__(self, model: GpuModel, table_device: str) -> None:
        super().__init__()
        self.table_device = table_device
        table = torch.full((model.table_rows, ROW_SIZE), 0.01, device=table_device)
        self.tables = nn.Embedding.from_pretrained(table, freeze=False, sparse=True)
        self.bottom = _dense(NUM_DENSE, *BOTTOM_WIDTHS)
        num_products = NUM_TABLES * (NUM_TABLES + 1) // 2
        self.top = _dense(ROW_SIZE + num_products, *TOP_WIDTHS)
        self.head = nn.Linear(TOP_WIDTHS[-1], 1)
        first, second = np.tril_indices(NUM_TABLES + 1, -1)
        self.register_buffer("first", torch.from_numpy(first))
        self.register_buffer("second", torch.from_numpy(second))

    def forward(self, dense: Any, ids: Any) -> Any:
        """`ids` are on the device of the tables."""
        rows = self.tables(ids).to(dense.device, non_blocking=True)
        x = self.bottom(dense)
        vectors = torch.cat([x[:, None], rows], dim=1)
        products = vectors @ vectors.transpose(1, 2)
        x = torch.cat([x, products[:, self.first, self.second]], dim=1)
        return self.head(self.top(x))


def _dense(*widths: int) -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers)
