"""What is trained: sizes and data, the same for every framework.

Only NumPy is imported here: the environment of the peers has no Stratagem, and ours has no torch.
No model has dropout: random numbers cost differently in each framework, and losses could not be
compared.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np

from benchmarks.workers.protocol import WorkerOptions

Array = np.ndarray[Any, Any]

MLP_SIZES = (784, 256, 128, 10)
_SEED = 0
# Random images are repeated beyond this many: an epoch of ResNet's is long to spread what an epoch
# costs over many steps, and drawing gigabytes takes longer than training on them.
_MAX_DISTINCT_BYTES = 200e6


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerSizes:
    width: int
    num_heads: int
    num_blocks: int
    length: int
    num_tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaSizes(TransformerSizes):
    """Sizes of a Llama."""

    num_kv_heads: int  # heads of keys and values
    inner_width: int  # of the feed-forward layers
    is_tied: bool = True  # True if the logits use the token embedding
    lora_rank: int = 0  # of the trained matrices beside queries and values; 0 to train everything

    @property
    def num_multiplied(self) -> int:
        """Weights that each token is multiplied by: all but an embedding that is only looked up."""
        key_width = self.num_kv_heads * self.width // self.num_heads
        block = 2 * self.width * (self.width + key_width) + 3 * self.width * self.inner_width
        norms = (2 * self.num_blocks + 1) * self.width
        return self.num_blocks * block + norms + self.num_tokens * self.width

    @property
    def flops_per_token(self) -> int:
        """FLOPs of training on one token, without recomputation.

        A trained weight takes 6: 2 each forward, for the gradient of its input, and for its own. A
        frozen weight lacks the last. Source: Chowdhery et al. 2022, PaLM, appendix B:
        6 N + 12 L H Q T; the reduction for frozen weights follows from its derivation.
        """
        attention = 12 * self.num_blocks * self.width * self.length
        if not self.lora_rank:
            return 6 * self.num_multiplied + attention
        key_width = self.num_kv_heads * self.width // self.num_heads
        num_trained = self.num_blocks * self.lora_rank * (3 * self.width + key_width)
        return 4 * self.num_multiplied + 6 * num_trained + attention


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """A model and its data."""

    name: str  # key of a table of workloads; every worker builds its model by it
    title: str  # how tables call it
    kind: str  # of model, as `keras_models` and `torch_models` know it
    batch_size: int  # of all devices together
    steps_per_epoch: int  # full batches in the data
    input_shape: tuple[int, ...] = ()  # of one example
    input_dtype: str = "float32"  # float32 in [0, 1), int32 tokens, or uint8 pixels
    num_classes: int = 10  # labels are 0 ... num_classes - 1
    # `steps_per_execution` on CPU; few where steps are written out one after the other
    # (convolutions), because compiling takes as many times longer.
    steps_per_call: int = 1
    sizes: TransformerSizes | None = None  # of a Transformer
    is_mixed: bool = False  # True if products are in bfloat16
    unit: str = "steps"  # what is counted on a GPU: "steps", "images" or "tokens"
    learning_rate: float = 1e-3  # of Adam; of AdamW for a Llama
    has_metrics: bool = True  # True if the accuracy is counted

    @property
    def units_per_step(self) -> int:
        per_example = self.transformer.length if self.unit == "tokens" else 1
        return 1 if self.unit == "steps" else self.batch_size * per_example

    def flops_per_step(self, num_parameters: int) -> float | None:
        """FLOPs of a step of a Transformer by the formula of `LlamaSizes`; None for others."""
        sizes = self.sizes
        if sizes is None:
            return None
        num_tokens = self.batch_size * sizes.length
        if isinstance(sizes, LlamaSizes):
            return float(num_tokens * sizes.flops_per_token)
        attention = 12 * sizes.num_blocks * sizes.width * sizes.length
        positions = sizes.length * sizes.width
        return float(num_tokens * (6 * (num_parameters - positions) + attention))

    @property
    def predicts_next_token(self) -> bool:
        return self.kind in ("gpt", "llama")

    def arrays(self) -> tuple[Any, Array]:
        """Returns the inputs and labels of one epoch, always the same."""
        rng = np.random.default_rng(_SEED)
        num_examples = self.batch_size * self.steps_per_epoch
        bytes_per_batch = (
            self.batch_size * np.prod(self.input_shape) * np.dtype(self.input_dtype).itemsize
        )
        num_distinct = self.steps_per_epoch
        while num_distinct % 2 == 0 and num_distinct * bytes_per_batch > _MAX_DISTINCT_BYTES:
            num_distinct //= 2
        inputs = self._draw(rng, num_distinct * self.batch_size)
        if num_distinct < self.steps_per_epoch:
            inputs = np.concatenate([inputs] * (self.steps_per_epoch // num_distinct))
        if self.predicts_next_token:
            return inputs, np.roll(inputs, -1, axis=1)
        return inputs, rng.integers(self.num_classes, size=num_examples, dtype=np.int32)

    def batch(self) -> tuple[Any, Array]:
        """Returns the first batch only."""
        return dataclasses.replace(self, steps_per_epoch=1).arrays()

    def _draw(self, rng: np.random.Generator, num_examples: int) -> Array:
        shape = (num_examples, *(self.input_shape or (self.transformer.length,)))
        if self.sizes:
            return rng.integers(self.sizes.num_tokens, size=shape, dtype="int32")
        if self.input_dtype == "float32":
            return rng.random(shape, dtype=np.float32)
        return rng.integers(256, size=shape, dtype=self.input_dtype)

    @property
    def transformer(self) -> TransformerSizes:
        assert self.sizes is not None
        return self.sizes


_SMALL = TransformerSizes(width=64, num_heads=4, num_blocks=2, length=64, num_tokens=1000)
# As many blocks as GPT-2 has, a third as wide: for a step that is cheap beside the
# compilation of its program.
_NARROW = TransformerSizes(width=256, num_heads=4, num_blocks=12, length=64, num_tokens=5000)


def _workload(name: str, title: str, kind: str, batch: int, steps: int, **more: Any) -> Workload:
    return Workload(
        name=name, title=title, kind=kind, batch_size=batch, steps_per_epoch=steps, **more
    )


def _by_name(*workloads: Workload) -> dict[str, Workload]:
    return {workload.name: workload for workload in workloads}


_IMAGES = {"input_shape": (224, 224, 3), "input_dtype": "uint8"}

WORKLOADS = _by_name(
    _workload("mlp", "MLP", "mlp", 128, 400, input_shape=(MLP_SIZES[0],), steps_per_call=20),
    _workload("small_mlp", "small MLP", "small_mlp", 64, 400, input_shape=(64,), steps_per_call=20),
    _workload("cnn", "CNN", "cnn", 128, 20, input_shape=(28, 28, 1), steps_per_call=5),
    _workload("transformer", "Transformer", "transformer", 64, 20, sizes=_SMALL, steps_per_call=20),
    _workload("images", "Encoded images", "none", 16, 200, **_IMAGES),
    _workload("gpt2", "GPT-2, 12 blocks", "gpt", 8, 1, sizes=_NARROW),
    _workload(
        "small_resnet50",
        "ResNet-50, 64x64",
        "resnet50",
        8,
        1,
        input_shape=(64, 64, 3),
        num_classes=1000,
    ),
)

_LLAMA_1B = LlamaSizes(  # as Llama 3.2
    width=2048,
    num_heads=32,
    num_kv_heads=8,
    num_blocks=16,
    inner_width=8192,
    length=2048,
    num_tokens=128_256,
)
_LLAMA_3B = dataclasses.replace(_LLAMA_1B, width=3072, num_heads=24, num_blocks=28)
_LLAMA_8B = dataclasses.replace(  # as Llama 3
    _LLAMA_1B, width=4096, num_blocks=32, inner_width=14336, is_tied=False, lora_rank=8
)
_GPT = TransformerSizes(width=1024, num_heads=16, num_blocks=24, length=1024, num_tokens=50304)


_LARGE = {"is_mixed": True, "has_metrics": False, "learning_rate": 1e-4}
_TOKENS = {**_LARGE, "unit": "tokens"}
_8K = dataclasses.replace(_LLAMA_1B, length=8192)

GPU_WORKLOADS = _by_name(
    dataclasses.replace(WORKLOADS["mlp"], name="gpu_mlp", steps_per_epoch=1000, has_metrics=False),
    _workload(
        "resnet50",
        "ResNet-50, bf16",
        "resnet50",
        256,
        32,
        num_classes=1000,
        unit="images",
        **_IMAGES,
        **{**_LARGE, "learning_rate": 1e-3},
    ),
    _workload("gpt", "GPT of 355 M, bf16", "gpt", 8, 16, sizes=_GPT, **_TOKENS),
    _workload("llama1b", "Llama of 1.2 B, bf16", "llama", 8, 8, sizes=_LLAMA_1B, **_TOKENS),
    _workload("llama1b_8k", "Llama of 1.2 B, 8,192 tokens", "llama", 2, 8, sizes=_8K, **_TOKENS),
    _workload("llama3b", "Llama of 3.2 B, bf16", "llama", 4, 8, sizes=_LLAMA_3B, **_TOKENS),
    _workload("llama8b_lora", "LoRA of a Llama of 8 B", "llama", 4, 8, sizes=_LLAMA_8B, **_TOKENS),
)


def tiny(workload: Workload) -> Workload:
    """Returns a workload of a GPU in a size for tests on a CPU."""
    small: dict[str, Any] = {"batch_size": 2, "steps_per_epoch": 8}
    if workload.sizes:
        sizes: dict[str, Any] = {"width": 64, "num_heads": 4, "num_blocks": 2, "num_tokens": 100}
        sizes["length"] = 32 if workload.transformer.length > 4096 else 16
        if isinstance(workload.sizes, LlamaSizes):
            rank = 2 if workload.sizes.lora_rank else 0
            sizes |= {"num_kv_heads": 2, "inner_width": 96, "lora_rank": rank}
        small["sizes"] = dataclasses.replace(workload.sizes, **sizes)
    elif workload.kind == "resnet50":
        small["input_shape"] = (32, 32, 3)
    else:
        small |= {"batch_size": 64, "steps_per_epoch": 200 if workload.kind == "mlp" else 20}
    return dataclasses.replace(workload, **small)


def workload_of(options: WorkerOptions) -> Workload:
    """Returns the workload that a worker was told to train."""
    workload = (WORKLOADS | GPU_WORKLOADS)[options.workload]
    workload = tiny(workload) if options.is_tiny else workload
    return dataclasses.replace(
        workload,
        steps_per_epoch=options.steps_per_epoch or workload.steps_per_epoch,
        batch_size=options.batch_size or workload.batch_size,
    )


def mlp_weights() -> list[Array]:
    """Returns the MLP's first weights, kernel and bias of each layer: Glorot's, as Keras draws."""
    rng = np.random.default_rng(_SEED)
    weights: list[Array] = []
    for rows, columns in itertools.pairwise(MLP_SIZES):
        limit = np.sqrt(6 / (rows + columns))
        weights.append(rng.uniform(-limit, limit, (rows, columns)).astype(np.float32))
        weights.append(np.zeros(columns, np.float32))
    return weights
