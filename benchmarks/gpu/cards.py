"""Command: language models planned for 8 and 64 cards: `python -m benchmarks.gpu.cards`.

The plans are estimates and need no GPU: a model like Llama, of which each card has some sequences.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import stratagem as sg  # isort: skip - before keras, because it selects the JAX backend
import jax
import keras

from benchmarks.large_models.cases import DECODERS
from benchmarks.large_models.keras_decoder import build_decoder, compiled

__all__ = ["main", "make_table", "plan_cards"]

_LENGTH, _SEQUENCES = 2048, 8
_GIB = 2**30


def plan_cards(decoder: str, num_cards: int, chip: str, *, length: int = _LENGTH) -> dict[str, Any]:
    """Returns the best settings for a decoder, as `PlanChoice.to_dict` gives them.

    Args:
        decoder: key of `DECODERS`.
        num_cards: number of cards.
        chip: name of the card, as in the targets of `sg.plan`.
        length: tokens of a sequence.
    """
    num_sequences = _SEQUENCES * num_cards
    tokens = jax.ShapeDtypeStruct((num_sequences, length), "int32")
    found = sg.planning.search(
        lambda: compiled(build_decoder(DECODERS[decoder], length, recomputes=False)),
        (tokens, tokens),
        f"{num_cards}x{chip}",
        compiles=False,
    )
    choices = [one.to_dict() for one in found.choices]
    for one in choices:
        one["tokens_per_s"] = num_sequences * length / one["step_s"]
    return {"decoder": decoder, "num_cards": num_cards, "chip": chip, "choices": choices}


def make_table(plans: Sequence[dict[str, Any]]) -> str:
    """Returns a Markdown table of the best choice of each plan."""
    headers = ("decoder", "cards", "settings", "GiB a card", "tokens/s", "MFU", "limit")
    lines = [headers, ("---",) * len(headers), *map(_row, plans)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _row(plan: dict[str, Any]) -> tuple[str, ...]:
    best = plan["choices"][0]
    return (
        plan["decoder"],
        f"{plan['num_cards']} {plan['chip']}",
        f"`{best['code']}`",
        f"{best['memory_bytes'] / _GIB:.1f}",
        f"{best['tokens_per_s']:,.0f}",
        f"{best['mfu']:.0%}",
        best["limit"],
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Plans all decoders, and writes the plans and a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.cards", description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="folder of the plans")
    parser.add_argument("--chip", default="H200", help="name of the card")
    parser.add_argument("--decoders", default="1B,8B", help="of benchmarks.large_models")
    parser.add_argument("--tiny", action="store_true", help="a small decoder")
    parsed = parser.parse_args(arguments)
    parsed.output.mkdir(parents=True, exist_ok=True)
    keras.config.set_dtype_policy("mixed_bfloat16")
    decoders = ["tiny"] if parsed.tiny else parsed.decoders.split(",")
    length = 16 if parsed.tiny else _LENGTH
    plans: list[dict[str, Any]] = []
    for decoder in decoders:
        for num_cards in (8, 64):
            plans.append(plan_cards(decoder, num_cards, parsed.chip, length=length))
            (parsed.output / "plans.json").write_text(json.dumps(plans, indent=1))
    (parsed.output / "summary.md").write_text(make_table(plans))
    print(make_table(plans), flush=True)


if __name__ == "__main__":
    main()
