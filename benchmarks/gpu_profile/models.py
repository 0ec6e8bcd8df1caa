"""Models that are profiled and planned on one GPU: those whose speed `benchmarks.gpu` measures."""

from __future__ import annotations

import dataclasses
from typing import Any

import stratagem  # noqa: F401  # isort: skip - before keras, because it selects the JAX backend
import jax
import keras

from benchmarks.gpu.models import Arrays, GpuModel, model_of
from benchmarks.gpu.workers.keras_networks import build_model, compile_model

__all__ = ["CASES", "Case"]


@dataclasses.dataclass(frozen=True)
class Case:
    """A model with its batch.

    Args:
        model: its sizes and data.
        num_steps: steps of a timed epoch.
    """

    model: GpuModel
    num_steps: int

    @property
    def batch_size(self) -> int:
        """Examples of a step."""
        return self.model.batch_size

    def build(self, is_fused: bool) -> keras.Model:
        """Returns the compiled model; `is_fused` asks for attention in one kernel."""
        if is_fused:
            keras.config.enable_flash_attention()
        else:
            keras.config.disable_flash_attention()
        network = build_model(self.model)
        compile_model(network, self.model, steps_per_call=1)
        return network

    def shapes(self, num_devices: int = 1) -> tuple[Any, ...]:
        """Returns the shapes of a batch of all devices."""
        return jax.tree.map(
            lambda array: jax.ShapeDtypeStruct(
                (num_devices * len(array), *array.shape[1:]), array.dtype
            ),
            self.arrays(1),
        )

    def arrays(self, num_batches: int) -> Arrays:
        """Returns examples and labels of some batches."""
        return dataclasses.replace(self.model, steps_per_epoch=num_batches).arrays()


def _made(is_tiny: bool) -> dict[str, Case]:
    mlp, resnet, bert, gpt = (
        model_of(name, is_tiny=is_tiny) for name in ("mlp", "resnet50", "bert", "gpt")
    )
    small = dataclasses.replace(resnet, batch_size=max(1, resnet.batch_size // 4))
    return {
        "mlp": Case(mlp, 4 if is_tiny else 500),
        "resnet50_64": Case(small, 2 if is_tiny else 20),
        "resnet50_256": Case(resnet, 2 if is_tiny else 12),
        "bert_base": Case(bert, 3 if is_tiny else 30),
        "gpt_350m": Case(gpt, 3 if is_tiny else 15),
    }


CASES: dict[bool, dict[str, Case]] = {is_tiny: _made(is_tiny) for is_tiny in (False, True)}
