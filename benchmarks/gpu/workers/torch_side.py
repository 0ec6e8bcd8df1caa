"""Peer: PyTorch, eager or compiled, with data on the device or sent there ahead of the steps."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from benchmarks.gpu.models import GpuModel
from benchmarks.gpu.options import SideOptions
from benchmarks.gpu.workers.measurement import Training, measure
from benchmarks.gpu.workers.torch_device import device_kind, peak_bytes, prepare_torch
from benchmarks.gpu.workers.torch_networks import build_model

__all__ = ["prepare"]

Batch = list[Any]


def prepare(options: SideOptions, model: GpuModel) -> Training:
    device = prepare_torch()
    table = torch.device("cpu") if options.table == "host" else device
    network = build_model(model, str(table))
    if model.kind != "dlrm":
        network = network.to(device)
    else:
        for name, child in network.named_children():
            if name != "tables":
                child.to(device)
        network.first, network.second = network.first.to(device), network.second.to(device)
    if model.kind == "resnet50":
        network = network.to(memory_format=torch.channels_last)
    step = _step(network, model, options, device)
    places = [device, table, device] if model.kind == "dlrm" else [device, device]
    batches = _Batches(model, places, on_device=options.data == "device")

    def train(num_steps: int) -> float:
        losses = [step(batch) for batch in itertools.islice(batches, num_steps)]
        return float(torch.stack(losses).mean().item())

    def train_epochs(num_epochs: int) -> float:
        return [train(model.steps_per_epoch) for _ in range(num_epochs)][-1]

    return Training(
        first_call=lambda: train(1),
        train=train_epochs,
        device_kind=device_kind(device),
        num_parameters=sum(one.numel() for one in network.parameters()),
        peak_bytes=peak_bytes,
    )


def _step(
    network: torch.nn.Module, model: GpuModel, options: SideOptions, device: Any
) -> Callable[[Batch], Any]:
    """Returns the training step: forward in bfloat16 where the model is so, loss, update."""
    network.train()
    forward: Any = network
    if options.compiled:
        mode = None if options.compiled == "default" else options.compiled
        forward = torch.compile(network, mode=mode)
    optimizer = _optimizer(network, model, device)
    is_mixed = model.kind in ("resnet50", "bert", "gpt")

    def step(batch: Batch) -> Any:
        *inputs, labels = batch
        optimizer.zero_grad(set_to_none=True)
        autocast = torch.autocast(device.type, torch.bfloat16)
        with autocast if is_mixed else contextlib.nullcontext():
            logits = forward(*inputs)
        if model.kind == "dlrm":
            loss = F.binary_cross_entropy_with_logits(logits, labels)
        else:
            loss = F.cross_entropy(logits.float().flatten(0, -2), labels.flatten())
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def _optimizer(network: torch.nn.Module, model: GpuModel, device: Any) -> Any:
    """Keras's constants; fused where PyTorch can."""
    if model.kind == "dlrm":
        return torch.optim.Adagrad(
            network.parameters(),
            lr=model.learning_rate,
            initial_accumulator_value=0.1,
            eps=1e-7,
            foreach=False,
        )
    return torch.optim.Adam(
        network.parameters(), lr=model.learning_rate, eps=1e-7, fused=device.type == "cuda"
    )


class _Batches:
    """Endless batches; those of the host are sent by a stream of their own, one ahead."""

    def __init__(self, model: GpuModel, places: list[Any], *, on_device: bool) -> None:
        x, y = model.arrays()
        columns = [*x, y] if isinstance(x, tuple) else [x, y]
        tensors = [torch.from_numpy(column) for column in columns]
        tensors[-1] = tensors[-1].long() if y.dtype.kind == "i" else tensors[-1]
        self._places, self._size = places, model.batch_size
        self._is_sent = any(place.type == "cuda" for place in places) and not on_device
        if on_device:
            tensors = [one.to(place) for one, place in zip(tensors, places, strict=True)]
        elif self._is_sent:
            tensors = [
                one.pin_memory() if place.type == "cuda" else one
                for one, place in zip(tensors, places, strict=True)
            ]
        self._tensors = tensors
        self._stream: Any = torch.cuda.Stream() if self._is_sent else None
        self._iterator = self._sent() if self._is_sent else self._slices()

    def __iter__(self) -> Iterator[Batch]:
        return self._iterator

    def _slices(self) -> Iterator[Batch]:
        while True:
            for begin in range(0, len(self._tensors[0]), self._size):
                yield [one[begin : begin + self._size] for one in self._tensors]

    def _sent(self) -> Iterator[Batch]:
        slices = self._slices()
        following = self._send(next(slices))
        while True:
            batch = following
            torch.cuda.current_stream().wait_stream(self._stream)
            for tensor in batch:
                if tensor.is_cuda:
                    tensor.record_stream(torch.cuda.current_stream())
            following = self._send(next(slices))
            yield batch

    def _send(self, batch: Batch) -> Batch:
        with torch.cuda.stream(self._stream):
            pairs = zip(batch, self._places, strict=True)
            return [one.to(place, non_blocking=True) for one, place in pairs]


if __name__ == "__main__":
    measure(prepare)
