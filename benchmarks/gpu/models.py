"""Sizes of the models and their data, the same for every framework. Imports only NumPy."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from benchmarks.gpu.transformer_sizes import LlamaSizes, TransformerSizes
from benchmarks.workloads import WORKLOADS, Workload

__all__ = ["MODELS", "Arrays", "GpuModel", "TransformerSizes", "model_of"]

Arrays = tuple[Any, np.ndarray[Any, Any]]

_SEED = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuModel:
    """A model to train, and its data.

    Args:
        name: key of `MODELS`.
        title: in tables.
        kind: "mlp", "resnet50", "bert", "gpt", "dlrm" or "llama".
        batch_size: examples per step.
        steps_per_epoch: full batches in the data.
        unit: what the table counts: "steps", "images", "sequences", "tokens" or "examples".
        learning_rate: of Adam; of AdamW for "llama", of Adagrad for "dlrm".
        transformer: sizes, for "bert", "gpt" and "llama".
        num_classes: of labels.
        table_rows: rows of all embedding tables together, for "dlrm".
        image_size: height and width, for "resnet50".
    """

    name: str
    title: str
    kind: str
    batch_size: int
    steps_per_epoch: int
    unit: str
    learning_rate: float = 1e-3
    transformer: TransformerSizes | None = None
    num_classes: int = 10
    table_rows: int = 0
    image_size: int = 224

    @property
    def units_per_step(self) -> int:
        """Number of `unit` in a step."""
        if self.unit == "tokens":
            assert self.transformer is not None
            return self.batch_size * self.transformer.length
        return 1 if self.unit == "steps" else self.batch_size

    def flops_per_step(self, num_parameters: int) -> float | None:
        """FLOPs of a step of a Transformer without recomputation; None for other models.

        Source: Chowdhery et al. 2022, PaLM, appendix B: 6 N + 12 L H Q T per token.
        """
        sizes = self.transformer
        if sizes is None:
            return None
        num_tokens = self.batch_size * sizes.length
        if isinstance(sizes, LlamaSizes):
            return float(num_tokens * sizes.flops_per_token)
        attention = 12 * sizes.num_blocks * sizes.width * sizes.length
        embeddings = sizes.length * sizes.width
        if self.kind == "bert":
            embeddings += sizes.num_tokens * sizes.width  # looked up, not multiplied
        return float(num_tokens * (6 * (num_parameters - embeddings) + attention))

    def arrays(self) -> Arrays:
        """Returns inputs and labels of an epoch, always the same."""
        if self.kind == "dlrm":
            return _dlrm_arrays(self)
        return self._workload().arrays()

    def _workload(self) -> Workload:
        sizes = self.transformer
        if sizes is None:
            workload = WORKLOADS["mlp" if self.kind == "mlp" else "resnet50"]
            shape = workload.input_shape
            if self.kind == "resnet50":
                shape = (self.image_size, self.image_size, 3)
            return dataclasses.replace(
                workload,
                batch_size=self.batch_size,
                steps_per_epoch=self.steps_per_epoch,
                input_shape=shape,
            )
        return Workload(
            name=self.name,
            title=self.title,
            batch_size=self.batch_size,
            steps_per_epoch=self.steps_per_epoch,
            input_shape=(sizes.length,),
            input_dtype="int32",
            num_tokens=sizes.num_tokens,
            num_classes=self.num_classes,
            predicts_next_token=self.kind in ("gpt", "llama"),
            cpu_steps_per_call=1,
            gpu_steps_per_call=1,
        )


# As in the reference DLRM (Naumov et al. 2019): 13 dense features, 26 categories, rows of 64.
NUM_DENSE, NUM_TABLES, ROW_SIZE = 13, 26, 64
BOTTOM_WIDTHS, TOP_WIDTHS = (512, 256, ROW_SIZE), (512, 256)


def _dlrm_arrays(model: GpuModel) -> Arrays:
    rng = np.random.default_rng(_SEED)
    count = model.batch_size * model.steps_per_epoch
    dense = rng.random((count, NUM_DENSE), dtype=np.float32)
    rows = model.table_rows // NUM_TABLES  # the tables are one array: each begins after the last
    ids = rng.integers(rows, size=(count, NUM_TABLES), dtype=np.int32)
    ids += np.arange(NUM_TABLES, dtype=np.int32) * rows
    labels = rng.integers(2, size=(count, 1)).astype(np.float32)
    return (dense, ids), labels


_BERT = TransformerSizes(width=768, num_heads=12, num_blocks=12, length=128, num_tokens=30522)
_GPT = TransformerSizes(width=1024, num_heads=16, num_blocks=24, length=1024, num_tokens=50304)
_LLAMA_1B = LlamaSizes(  # as Llama 3.2
    width=2048,
    num_heads=32,
    num_kv_heads=8,
    num_blocks=16,
    inner_width=8192,
    length=2048,
    num_tokens=128_256,
    is_tied=True,
)
_LLAMA_3B = dataclasses.replace(_LLAMA_1B, width=3072, num_heads=24, num_blocks=28)
_LLAMA_8B = dataclasses.replace(  # as Llama 3
    _LLAMA_1B, width=4096, num_blocks=32, inner_width=14336, is_tied=False, lora_rank=8
)
_TINY = TransformerSizes(width=64, num_heads=4, num_blocks=2, length=16, num_tokens=100)
_TINY_LLAMA = LlamaSizes(
    width=64,
    num_heads=4,
    num_kv_heads=2,
    num_blocks=2,
    inner_width=96,
    length=16,
    num_tokens=100,
    is_tied=True,
)


def _llama(name: str, title: str, sizes: LlamaSizes, *, batch_size: int) -> GpuModel:
    return GpuModel(
        name=name,
        title=title,
        kind="llama",
        batch_size=batch_size,
        steps_per_epoch=8,
        unit="tokens",
        learning_rate=1e-4,
        transformer=sizes,
    )


MODELS = {
    model.name: model
    for model in (
        GpuModel(
            name="mlp", title="MLP", kind="mlp", batch_size=128, steps_per_epoch=1000, unit="steps"
        ),
        GpuModel(
            name="resnet50",
            title="ResNet-50, bf16",
            kind="resnet50",
            batch_size=256,
            steps_per_epoch=32,
            unit="images",
            num_classes=1000,
        ),
        GpuModel(
            name="bert",
            title="BERT-base, bf16",
            kind="bert",
            batch_size=64,
            steps_per_epoch=40,
            unit="sequences",
            learning_rate=1e-4,
            transformer=_BERT,
            num_classes=2,
        ),
        GpuModel(
            name="gpt",
            title="GPT of 355 M, bf16",
            kind="gpt",
            batch_size=8,
            steps_per_epoch=16,
            unit="tokens",
            learning_rate=1e-4,
            transformer=_GPT,
        ),
        GpuModel(
            name="dlrm",
            title="DLRM, tables of 5.1 GB",
            kind="dlrm",
            batch_size=4096,
            steps_per_epoch=40,
            unit="examples",
            learning_rate=1e-2,
            table_rows=NUM_TABLES * 769_000,
        ),
        _llama("llama1b", "Llama of 1.2 B, bf16", _LLAMA_1B, batch_size=8),
        _llama(
            "llama1b-8k",
            "Llama of 1.2 B, 8,192 tokens",
            dataclasses.replace(_LLAMA_1B, length=8192),
            batch_size=2,
        ),
        _llama("llama3b", "Llama of 3.2 B, bf16", _LLAMA_3B, batch_size=4),
        _llama("llama8b-lora", "LoRA of a Llama of 8 B, bf16", _LLAMA_8B, batch_size=4),
    )
}

_TINY_SIZES: dict[str, dict[str, Any]] = {
    "mlp": {"steps_per_epoch": 200},
    "resnet50": {"batch_size": 2, "steps_per_epoch": 8, "image_size": 32},
    "bert": {"batch_size": 4, "steps_per_epoch": 20, "transformer": _TINY},
    "gpt": {"batch_size": 2, "steps_per_epoch": 8, "transformer": _TINY},
    "dlrm": {"batch_size": 64, "steps_per_epoch": 20, "table_rows": NUM_TABLES * 100},
    "llama1b": {"batch_size": 2, "transformer": _TINY_LLAMA},
    "llama1b-8k": {
        "batch_size": 2,
        "transformer": dataclasses.replace(_TINY_LLAMA, length=32),
    },
    "llama3b": {"batch_size": 2, "transformer": _TINY_LLAMA},
    "llama8b-lora": {
        "batch_size": 2,
        "transformer": dataclasses.replace(_TINY_LLAMA, is_tied=False, lora_rank=2),
    },
}


def model_of(name: str, *, is_tiny: bool) -> GpuModel:
    """Returns a model by name, in its own size or in one for tests on a CPU."""
    return dataclasses.replace(MODELS[name], **(_TINY_SIZES[name] if is_tiny else {}))
