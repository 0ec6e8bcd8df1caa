"""Differences to one device: `python -m benchmarks.large_models.exactness` prints a table.

Every combination of a mesh, a policy and a technique trains a small decoder on eight virtual
devices. The table has the largest difference of a weight from training on one device.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable
from typing import Any

import stratagem as sg  # isort: skip - before keras, because it selects the JAX backend
import click
import jax
import keras
import numpy as np

from benchmarks.large_models.cases import Decoder
from benchmarks.large_models.keras_decoder import build_decoder

__all__ = ["MESHES", "POLICIES", "TECHNIQUES", "Mesh", "Row", "compare", "make_table"]

_NUM_DEVICES = 8
POLICIES = ("float32", "mixed_bfloat16")
# So much may a weight differ from that of one device; where it does, the command exits with 1.
_BOUNDS = {"float32": 1e-5, "mixed_bfloat16": 2e-2}
TECHNIQUES = ("none", "LoRA", "accumulation", "recomputation", "LoRA on int8")
# Matrices of more than 1,024 elements are sharded.
_SIZES = Decoder(64, 4, 2, 128, 2, 96)
_LENGTH, _NUM_ROWS, _BATCH_SIZE, _RANK = 8, 44, 16, 4
# Heads and inner features are divided over the devices of a replica, as KerasHub's Llama does.
_LAYOUTS = {
    "embedding/embeddings": ("logical", None),
    ".*(query|key|value|output)/kernel": ("logical", None),
    ".*(gate|inner|logits)/kernel": (None, "logical"),
    ".*outer/kernel": ("logical", None),
}


@dataclasses.dataclass(frozen=True)
class Mesh:
    """Sizes of the three axes of a mesh.

    Args:
        data: copies of the state, each on its own replicas.
        shard: replicas that store one copy together.
        model: devices of a replica.
    """

    data: int
    shard: int
    model: int

    def __str__(self) -> str:
        return f"{self.data} x {self.shard} x {self.model}"

    def strategy(self) -> sg.MirroredStrategy:
        """Returns the strategy with this mesh."""
        is_sharded, has_groups = self.shard > 1, self.model > 1
        return sg.MirroredStrategy(
            [f"cpu:{index}" for index in range(self.data * self.shard * self.model)],
            shard_state="all" if is_sharded else None,
            shard_size=self.shard if is_sharded else None,
            devices_per_replica=self.model if has_groups else None,
            layout_map=_LAYOUTS if has_groups else None,
        )


MESHES = tuple(
    Mesh(*sizes)
    for sizes in itertools.product((1, 2, 4), repeat=3)
    if math.prod(sizes) == _NUM_DEVICES
)


@dataclasses.dataclass(frozen=True)
class Row:
    """One combination beside one device.

    Args:
        policy: of Keras.
        technique: of fine-tuning or of saving memory.
        differences: the largest difference of a weight, by mesh.
        change: the largest change of a weight by training, on one device.
    """

    policy: str
    technique: str
    differences: dict[Mesh, float]
    change: float


def _trained(strategy: Any, policy: str, technique: str) -> tuple[list[np.ndarray], float]:
    """Trains two epochs, whose last batches are short; returns weights and their change."""
    keras.backend.clear_session(free_memory=False)
    keras.utils.set_random_seed(3)
    keras.config.set_dtype_policy(policy)
    with strategy.scope():
        model = build_decoder(_SIZES, _LENGTH, recomputes=technique == "recomputation")
        if technique.endswith("int8"):
            model.quantize("int8")
        if technique.startswith("LoRA"):
            _adapt(model)
        steps = 2 if technique == "accumulation" else None
        optimizer = keras.optimizers.Adam(
            1e-3, epsilon=1e-3, gradient_accumulation_steps=steps, global_clipnorm=1.0
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss)
    first = model.get_weights()
    random = np.random.default_rng(5)
    tokens = random.integers(0, _SIZES.vocabulary, (_NUM_ROWS, _LENGTH + 1)).astype("int32")
    model.fit(tokens[:, :-1], tokens[:, 1:], _BATCH_SIZE, epochs=2, shuffle=False, verbose=0)
    last = model.get_weights()
    return last, largest_difference(first, last)


def _adapt(model: keras.Model) -> None:
    """Trains adapters of the dense layers and the embedding only."""
    for layer in model._flatten_layers(include_self=False):
        if isinstance(layer, keras.layers.Dense | keras.layers.Embedding):
            layer.enable_lora(_RANK)
        elif isinstance(layer, keras.layers.RMSNormalization):
            layer.trainable = False


def largest_difference(ones: Iterable[np.ndarray], others: Iterable[np.ndarray]) -> float:
    """Returns the largest absolute difference of two lists of arrays."""
    return max(
        float(np.max(np.abs(np.float64(one) - np.float64(other)), initial=0.0))
        for one, other in zip(ones, others, strict=True)
    )


def compare(policy: str, technique: str, meshes: Iterable[Mesh] = MESHES) -> Row:
    """Trains one combination on one device, and on each mesh."""
    expected, change = _trained(sg.OneDeviceStrategy("cpu:0"), policy, technique)
    differences = {
        mesh: largest_difference(expected, _trained(mesh.strategy(), policy, technique)[0])
        for mesh in meshes
    }
    return Row(policy, technique, differences, change)


def make_table(rows: Iterable[Row], meshes: Iterable[Mesh] = MESHES) -> str:
    """Returns a Markdown table; meshes are data x shard x model."""
    meshes = [*meshes]
    lines = [f"| policy | with | change by training | {' | '.join(map(str, meshes))} |"]
    lines.append(f"|---|---|---:|{'---:|' * len(meshes)}")
    for row in rows:
        found = (f"{row.differences[mesh]:.1e}" for mesh in meshes)
        lines.append(f"| {row.policy} | {row.technique} | {row.change:.1e} | {' | '.join(found)} |")
    return "\n".join(lines)


@click.command()
@click.option("--only", default="", help="Combinations whose policy and technique contain this.")
def main(only: str) -> None:
    """Prints the table."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", _NUM_DEVICES)
    rows: list[Row] = []
    with jax.numpy_dtype_promotion("standard"):
        for policy, technique in itertools.product(POLICIES, TECHNIQUES):
            if only in f"{policy} {technique}":
                rows.append(compare(policy, technique))
                print(rows[-1], flush=True)
    print(make_table(rows))
    if any(max(row.differences.values()) > _BOUNDS[row.policy] for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
