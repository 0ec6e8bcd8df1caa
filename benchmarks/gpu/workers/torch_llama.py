"""Peer: a Llama of Transformers in PyTorch, eager or compiled, with PyTorch's fused attention."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
import transformers

from benchmarks.gpu.models import GpuModel
from benchmarks.gpu.options import SideOptions
from benchmarks.gpu.transformer_sizes import LlamaSizes
from benchmarks.gpu.workers.measurement import Training, measure
from benchmarks.gpu.workers.torch_device import device_kind, peak_bytes, prepare_torch

__all__ = ["build_llama", "prepare", "trained"]

_DECAY, _EPSILON = 0.004, 1e-7  # Keras's


def build_llama(model: GpuModel, device: Any) -> Any:
    """Returns a causal language model that is created on a device; with LoRA, from peft."""
    sizes = model.transformer
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

    lora = peft.LoraConfig(
        r=sizes.lora_rank, lora_alpha=sizes.lora_rank, target_modules=["q_proj", "v_proj"]
    )
    return peft.get_peft_model(network, lora, autocast_adapter_dtype=False)


def trained(network: Any) -> list[Any]:
    """Returns the parameters that are trained."""
    return [one for one in network.parameters() if one.requires_grad]


def prepare(options: SideOptions, model: GpuModel) -> Training:
    device = prepare_torch()
    network = build_llama(model, device)
    network.train()
    step = _step(network, model, options, device)
    tokens, labels = (torch.from_numpy(one).long().to(device) for one in model.arrays())
    size = model.batch_size
    calls = [(tokens[at : at + size], labels[at : at + size]) for at in range(0, len(tokens), size)]
    batches = itertools.cycle(calls)

    def train(num_steps: int) -> float:
        losses = [step(*batch) for batch in itertools.islice(batches, num_steps)]
        return float(torch.stack(losses).mean().item())

    def train_epochs(num_epochs: int) -> float:
        return [train(model.steps_per_epoch) for _ in range(num_epochs)][-1]

    return Training(
        first_call=lambda: train(1),
        train=train_epochs,
        device_kind=device_kind(device),
        num_parameters=sum(one.numel() for one in trained(network)),
        peak_bytes=peak_bytes,
    )


def _step(
    network: Any, model: GpuModel, options: SideOptions, device: Any
) -> Callable[[Any, Any], Any]:
    """Returns the step of a batch; the loss is compiled together with the model.

    The last batch of each `options.accumulation` updates the weights.
    """

    def loss_of(tokens: Any, labels: Any) -> Any:
        logits = network(input_ids=tokens).logits
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())

    if options.compiled:
        mode = None if options.compiled == "default" else options.compiled
        loss_of = torch.compile(loss_of, mode=mode)
    optimizer = torch.optim.AdamW(
        trained(network),
        lr=model.learning_rate,
        eps=_EPSILON,
        weight_decay=_DECAY,
        fused=device.type == "cuda",
    )

    batches = itertools.count(1)

    def step(tokens: Any, labels: Any) -> Any:
        with torch.autocast(device.type, torch.bfloat16):
            loss = loss_of(tokens, labels)
        (loss / options.accumulation).backward()
        if next(batches) % options.accumulation == 0:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


if __name__ == "__main__":
    measure(prepare)
