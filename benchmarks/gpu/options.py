"""The options of a side's process. Imports only the standard library."""

from __future__ import annotations

import dataclasses
import json
import sys

__all__ = ["SideOptions"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SideOptions:
    """What the process of a side trains, and for how long.

    Args:
        model: key of `benchmarks.gpu.models.MODELS`; "" for checkpoints.
        result: file that the process writes its figures to, again after each stage.
        begun_s: `time.time()` when the process was started.
        platform: "gpu", or "cpu" to try the programs.
        steps_per_call: steps in one call of the host.
        data: "host" or "device".
        table: memory of DLRM's tables: "device", "pinned_host", "central" or "host".
        attention: of a Llama: "causal", or "mask" for the mask that KerasHub passes to the kernel.
        loss: of a Llama: "whole", or "chunks" of the vocabulary.
        remat: policy of `sg.remat` for the blocks of a Llama; "" keeps all activations.
        accumulation: batches of a Llama whose mean gradient makes an update.
        optimizer_memory: of a Llama's optimizer state: "device" or "pinned_host".
        compiled: mode of `torch.compile`; "" for eager PyTorch.
        num_rounds: of measurement; 0 for the first step only.
        round_s: target duration of a round.
        is_tiny: small sizes, for a CPU.
        state_bytes: of the state that a checkpoint saves.
        folder: where checkpoints are written.
        gate: file that a process locks while it trains, so that the next one can prepare
            meanwhile; "" for none.
        profile: file of a profile that is taken after the rounds, by sides that can; "" for none.
    """

    model: str = ""
    result: str
    begun_s: float
    platform: str = "gpu"
    steps_per_call: int = 1
    data: str = "host"
    table: str = "device"
    attention: str = "causal"
    loss: str = "whole"
    remat: str = ""
    accumulation: int = 1
    optimizer_memory: str = "device"
    compiled: str = ""
    num_rounds: int = 3
    round_s: float = 2.0
    is_tiny: bool = False
    state_bytes: int = 0
    folder: str = ""
    gate: str = ""
    profile: str = ""

    @classmethod
    def from_command_line(cls) -> SideOptions:
        """Returns the options that the runner passed."""
        return cls(**json.loads(sys.argv[1]))
