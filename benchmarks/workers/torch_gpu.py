"""Peer: PyTorch on a GPU, eager or compiled, with data there or sent there ahead of the steps.

A Llama is that of Transformers, with PyTorch's fused attention; LoRA is that of peft.
"""

from __future__ import annotations

import contextlib
import itertools
import platform
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from benchmarks.workers.protocol import Training, WorkerOptions, serve
from benchmarks.workers.torch_models import build_model
from benchmarks.workloads import LlamaSizes, Workload, workload_of

_DECAY, _EPSILON = 0.004, 1e-7  # Keras's


def prepare(options: WorkerOptions) -> Training:
    workload = workload_of(options)
    # Float32 is multiplied as XLA does by default.
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    if workload.kind == "llama":
        network = _llama(workload, device)
    else:
        network = build_model(workload).to(device)
    step = _step(network, workload, options, device)
    batches = _batches(workload, device, on_device=options.data_on_device)

    def run_epochs(num_epochs: int) -> float:
        for _ in range(num_epochs):
            taken = itertools.islice(batches, workload.steps_per_epoch)
            losses = [step(*batch) for batch in taken]
            loss = float(torch.stack(losses).mean().item())
        return loss

    def details() -> dict[str, Any]:
        is_gpu = torch.cuda.is_available()
        return {
            "device_kind": torch.cuda.get_device_name(device) if is_gpu else platform.processor(),
            "peak_bytes": torch.cuda.max_memory_allocated() if is_gpu else None,
            "num_parameters": sum(one.numel() for one in _trained(network)),
        }

    return Training(run_epochs, workload.steps_per_epoch, details)


def _llama(workload: Workload, device: Any) -> Any:
    import transformers

    sizes = workload.sizes
    assert isinstance(sizes, LlamaSizes)
    torch.manual_seed(0)
    config: Any = transformers.LlamaConfig(
        vocab_size=sizes.num_tokens,
        hidden_size=sizes.width,
        intermediate_size=sizes.inner_width,
        num_hidden_layers=sizes.num_blocks,
        num_attention_heads=sizes.num_heads,
        num_key_value_heads=sizes.num_kv_heads,
        max_position_embeddings=sizes.length,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        tie_word_embeddings=sizes.is_tied,
        use_cache=False,
    )
    dtype = torch.bfloat16 if sizes.lora_rank else torch.float32
    with torch.device(device):
        network: Any = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation="sdpa", dtype=dtype
        )
    if not sizes.lora_rank:
        return network
    import peft

    rank = sizes.lora_rank
    lora = peft.LoraConfig(r=rank, lora_alpha=rank, target_modules=["q_proj", "v_proj"])
    return peft.get_peft_model(network, lora, autocast_adapter_dtype=False)


def _trained(network: Any) -> list[Any]:
    return [one for one in network.parameters() if one.requires_grad]


def _step(
    network: Any, workload: Workload, options: WorkerOptions, device: Any
) -> Callable[..., Any]:
    """Returns the step of a batch; the last of each `options.accumulation` updates the weights."""
    network.train()

    def loss_of(*inputs: Any, labels: Any) -> Any:
        if workload.kind == "llama":
            logits = network(input_ids=inputs[0]).logits
        else:
            logits = network(*inputs)
        return F.cross_entropy(logits.float().flatten(0, -2), labels.flatten())

    compute: Any = torch.compile(loss_of) if options.compiled else loss_of
    optimizer = _optimizer(network, workload, is_fused=device.type == "cuda")
    batches = itertools.count(1)

    def step(*batch: Any) -> Any:
        *inputs, labels = batch
        autocast = torch.autocast(device.type, torch.bfloat16)
        with autocast if workload.is_mixed else contextlib.nullcontext():
            loss = compute(*inputs, labels=labels)
        (loss / options.accumulation).backward()
        if next(batches) % options.accumulation == 0:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def _optimizer(network: Any, workload: Workload, *, is_fused: bool) -> Any:
    """Keras's constants; fused where PyTorch can."""
    common: dict[str, Any] = {"lr": workload.learning_rate, "eps": _EPSILON}
    if workload.kind == "llama":
        common["weight_decay"] = _DECAY
        return torch.optim.AdamW(_trained(network), **common, fused=is_fused)
    return torch.optim.Adam(network.parameters(), **common, fused=is_fused)


def _batches(workload: Workload, device: Any, *, on_device: bool) -> Iterator[list[Any]]:
    """Yields batches without end; a stream of its own sends those of the host, one ahead."""
    x, y = workload.arrays()
    tensors = [torch.from_numpy(x), torch.from_numpy(y).long()]
    if on_device or device.type == "cpu":
        yield from _slices([one.to(device) for one in tensors], workload.batch_size)
    slices = _slices([one.pin_memory() for one in tensors], workload.batch_size)
    stream = torch.cuda.Stream()

    def send() -> list[Any]:
        with torch.cuda.stream(stream):
            return [one.to(device, non_blocking=True) for one in next(slices)]

    following = send()
    while True:
        batch = following
        torch.cuda.current_stream().wait_stream(stream)
        for tensor in batch:
            tensor.record_stream(torch.cuda.current_stream())
        following = send()
        yield batch


def _slices(tensors: list[Any], size: int) -> Iterator[list[Any]]:
    while True:
        for begin in range(0, len(tensors[0]), size):
            yield [one[begin : begin + size] for one in tensors]


if __name__ == "__main__":
    serve(prepare)
