"""Draws where each byte of a fine-tuned model is: `guide_fine_tune.png`.

python docs/pictures/draw_fine_tune.py

All numbers are arithmetic on the sizes of Llama 2 7B, trained on one sequence of 2,048 tokens a
device, with blocks that are computed again in the backward pass.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

WIDTH, INNER, NUM_LAYERS, VOCABULARY, NUM_HEADS, LENGTH = 4096, 11_008, 32, 32_000, 32, 2048
NUM_DEVICES, RANK = 8, 8
CARD_GIB = 80
GIB = 2**30
INK, MUTED, PAPER = "#1f2937", "#6b7280", "#fbfbf9"
COLORS = {
    "weights": "#f2b134",
    "optimizer state": "#b45309",
    "gradients": "#c2410c",
    "gathered blocks": "#4338ca",
    "activations": "#15803d",
}
BLOCK = 4 * WIDTH**2 + 3 * WIDTH * INNER + 2 * WIDTH
PARAMETERS = NUM_LAYERS * BLOCK + 2 * VOCABULARY * WIDTH + WIDTH
# Rank 8 on the queries and values of each block, as KerasHub's `enable_lora` does.
ADAPTERS = NUM_LAYERS * 2 * 2 * RANK * WIDTH


@dataclasses.dataclass(frozen=True)
class Setting:
    """One way to train.

    Args:
        name: below the bar.
        trained: parameters that are trained, in float32 with Adam.
        frozen_bytes: bytes of the other parameters.
        sharded: what is sharded over the devices: weights, state, both or nothing.
    """

    name: str
    trained: int
    frozen_bytes: int
    sharded: str = ""

    def parts(self) -> dict[str, float]:
        """Bytes of a device, by what they are for."""
        weights_share = NUM_DEVICES if "weights" in self.sharded else 1
        state_share = NUM_DEVICES if "state" in self.sharded else 1
        # Blocks are gathered in bfloat16, or as they are stored.
        block_bytes = BLOCK if self.frozen_bytes else 2 * BLOCK
        # A whole gradient is on a device for one block, where it is reduce-scattered at once.
        whole = min(self.trained, BLOCK) if "weights" in self.sharded else self.trained
        return {
            "weights": (4 * self.trained + self.frozen_bytes) / weights_share,
            "optimizer state": 8 * self.trained / state_share,
            "gradients": 4 * whole + (4 * self.trained / NUM_DEVICES if weights_share > 1 else 0),
            "gathered blocks": 2 * block_bytes if weights_share > 1 else 0,
            "activations": activation_bytes(),
        }


def activation_bytes() -> int:
    """The input of each block, one block in full with its attention, and the logits."""
    inputs = NUM_LAYERS * LENGTH * WIDTH * 2
    block = LENGTH * (3 * INNER + 6 * WIDTH) * 2 + NUM_HEADS * LENGTH**2 * 4
    return inputs + block + 2 * LENGTH * VOCABULARY * 4


PANELS = {
    "all weights are trained": [
        Setting("replicated", PARAMETERS, 0),
        Setting('"optimizer"', PARAMETERS, 0, "state"),
        Setting('"all"', PARAMETERS, 0, "weights, state"),
    ],
    "LoRA, base in int8": [
        Setting("replicated", ADAPTERS, PARAMETERS),
        Setting('"optimizer"', ADAPTERS, PARAMETERS, "state"),
        Setting('"all"', ADAPTERS, PARAMETERS, "weights, state"),
    ],
}


def main() -> None:
    """Writes the picture beside this file."""
    figure, panels = plt.subplots(1, 2, figsize=(9.2, 4.4), sharey=True, layout="constrained")
    figure.patch.set_facecolor(PAPER)
    for axes, (title, settings) in zip(panels, PANELS.items(), strict=True):
        axes.set_facecolor(PAPER)
        for place, setting in enumerate(settings):
            bottom = 0.0
            for kind, num_bytes in setting.parts().items():
                size = num_bytes / GIB
                axes.bar(place, size, 0.62, bottom, color=COLORS[kind], label=kind)
                bottom += size
            axes.text(place, bottom + 1.5, f"{bottom:.0f} GiB", ha="center", color=INK)
        axes.axhline(CARD_GIB, color=MUTED, ls="--", lw=1)
        axes.set_xticks(range(len(settings)), [one.name for one in settings], color=INK)
        axes.set_title(title, color=INK, fontsize=12)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(length=0)
    panels[1].text(2.45, CARD_GIB + 1.5, "a card of 80 GiB", ha="right", color=MUTED)
    panels[0].set_ylabel("GiB of a device", color=INK)
    handles, labels = panels[0].get_legend_handles_labels()
    kinds = dict(zip(labels, handles, strict=True))
    figure.legend(kinds.values(), kinds.keys(), loc="outside lower center", ncols=5, frameon=False)
    figure.savefig(Path(__file__).with_name("guide_fine_tune.png"), dpi=150, facecolor=PAPER)


if __name__ == "__main__":
    main()
