"""Plans of language models for several cards, from what they are computed to the table."""

from __future__ import annotations

import jax
import pytest

from benchmarks.gpu.cards import make_table, plan_cards


@pytest.mark.slow
def test_plan_of_a_small_decoder() -> None:
    with jax.numpy_dtype_promotion("standard"):
        plan = plan_cards("tiny", 8, "H200", length=16)
    best = plan["choices"][0]
    assert best["fits"]
    assert best["tokens_per_s"] == 8 * 8 * 16 / best["step_s"]
    assert best["step_s"] <= 1.05 * min(one["step_s"] for one in plan["choices"])


def test_table_has_the_best_choice() -> None:
    best = {"code": "sg.MirroredStrategy()", "memory_bytes": 3 * 2**30, "tokens_per_s": 1234567.0}
    best |= {"mfu": 0.412, "limit": "compute"}
    worse = best | {"code": "sg.CentralStorageStrategy()"}
    table = make_table(
        [{"decoder": "1B", "num_cards": 64, "chip": "H200", "choices": [best, worse]}]
    )
    row = "| 1B | 64 H200 | `sg.MirroredStrategy()` | 3.0 | 1,234,567 | 41% | compute |"
    assert table.splitlines()[2:] == [row]
