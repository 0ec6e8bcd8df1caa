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

__all__ = ["MLP_SIZES", "WORKLOADS", "Array", "Workload", "mlp_weights", "workload_of"]

Array = np.ndarray[Any, Any]

MLP_SIZES = (784, 256, 128, 10)
_SEED = 0
# Random images are repeated beyond this many: an epoch of ResNet's is long to spread what an epoch
# costs over many steps, and drawing gigabytes takes longer than training on them.
_MAX_DISTINCT_BYTES = 200e6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """A model and its data.

    Args:
        name: key of `WORKLOADS`; every worker builds its model by it.
        title: how tables call it.
        batch_size: of all devices together.
        steps_per_epoch: full batches in the data.
        input_shape: of one example.
        input_dtype: float32 in [0, 1), int32 tokens, or uint8 pixels.
        num_classes: labels are 0 ... num_classes - 1.
        cpu_steps_per_call: `steps_per_execution` on CPU; few where steps are written out one after
            the other (convolutions), because compiling takes as many times longer.
        gpu_steps_per_call: on GPU.
        num_tokens: size of the vocabulary.
        predicts_next_token: whether the labels are the inputs, shifted by a token.
    """

    name: str
    title: str
    batch_size: int
    steps_per_epoch: int
    input_shape: tuple[int, ...]
    cpu_steps_per_call: int
    gpu_steps_per_call: int
    input_dtype: str = "float32"
    num_classes: int = 10
    num_tokens: int = 0
    predicts_next_token: bool = False

    def steps_per_call(self, platform: str) -> int:
        return self.cpu_steps_per_call if platform == "cpu" else self.gpu_steps_per_call

    def arrays(self) -> tuple[Array, Array]:
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
        labels = rng.integers(self.num_classes, size=num_examples, dtype=np.int32)
        return inputs, labels

    def batch(self) -> tuple[Array, Array]:
        """Returns the first batch only."""
        inputs, labels = dataclasses.replace(self, steps_per_epoch=1).arrays()
        return inputs, labels

    def _draw(self, rng: np.random.Generator, num_examples: int) -> Array:
        shape = (num_examples, *self.input_shape)
        if self.input_dtype == "float32":
            return rng.random(shape, dtype=np.float32)
        highest = self.num_tokens if self.input_dtype == "int32" else 256
        return rng.integers(highest, size=shape, dtype=self.input_dtype)


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload(
            name="mlp",
            title="MLP",
            batch_size=128,
            steps_per_epoch=400,
            input_shape=(MLP_SIZES[0],),
            cpu_steps_per_call=20,
            gpu_steps_per_call=100,
        ),
        Workload(
            name="small_mlp",
            title="small MLP",
            batch_size=64,
            steps_per_epoch=400,
            input_shape=(64,),
            cpu_steps_per_call=20,
            gpu_steps_per_call=100,
        ),
        Workload(
            name="cnn",
            title="CNN",
            batch_size=128,
            steps_per_epoch=20,
            input_shape=(28, 28, 1),
            cpu_steps_per_call=5,
            gpu_steps_per_call=10,
        ),
        Workload(
            name="transformer",
            title="Transformer",
            batch_size=64,
            steps_per_epoch=20,
            input_shape=(64,),
            input_dtype="int32",
            num_tokens=1000,
            cpu_steps_per_call=20,
            gpu_steps_per_call=20,
        ),
        Workload(
            name="large_transformer",
            title="Transformer 109M bf16",
            batch_size=32,
            steps_per_epoch=20,
            input_shape=(512,),
            input_dtype="int32",
            num_tokens=30522,
            cpu_steps_per_call=1,
            gpu_steps_per_call=10,
        ),
        Workload(
            name="billion_transformer",
            title="Transformer 1.1G bf16",
            batch_size=8,
            steps_per_epoch=4,
            input_shape=(512,),
            input_dtype="int32",
            num_tokens=32000,
            cpu_steps_per_call=1,
            gpu_steps_per_call=1,
        ),
        Workload(
            name="encoded_images",
            title="Encoded images",
            batch_size=16,
            steps_per_epoch=200,
            input_shape=(224, 224, 3),
            input_dtype="uint8",
            cpu_steps_per_call=1,
            gpu_steps_per_call=1,
        ),
        Workload(
            name="resnet50",
            title="ResNet-50 bf16",
            batch_size=256,
            steps_per_epoch=64,
            input_shape=(224, 224, 3),
            input_dtype="uint8",
            num_classes=1000,
            cpu_steps_per_call=1,
            gpu_steps_per_call=8,
        ),
        Workload(
            name="bert",
            title="BERT, 12 blocks",
            batch_size=8,
            steps_per_epoch=1,
            input_shape=(64,),
            input_dtype="int32",
            num_tokens=5000,
            cpu_steps_per_call=1,
            gpu_steps_per_call=1,
        ),
        Workload(
            name="gpt2",
            title="GPT-2, 12 blocks",
            batch_size=8,
            steps_per_epoch=1,
            input_shape=(64,),
            input_dtype="int32",
            num_classes=5000,
            num_tokens=5000,
            predicts_next_token=True,
            cpu_steps_per_call=1,
            gpu_steps_per_call=1,
        ),
        Workload(
            name="small_resnet50",
            title="ResNet-50, 64x64",
            batch_size=8,
            steps_per_epoch=1,
            input_shape=(64, 64, 3),
            num_classes=1000,
            cpu_steps_per_call=1,
            gpu_steps_per_call=1,
        ),
    )
}


def workload_of(options: WorkerOptions) -> Workload:
    """Returns the workload that a worker was told to train."""
    workload = WORKLOADS[options.workload]
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
