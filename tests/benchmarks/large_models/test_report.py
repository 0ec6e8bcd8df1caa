"""Tables and the picture of compiled decoders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.large_models.report import draw, make_table, read_results

_MIB = 2**20


def _facts(**fields: Any) -> dict[str, Any]:
    return {
        "decoder": "6 layers",
        "machine": "v5e:2x4",
        "side": "JAX",
        "dtype": "float32",
        "recomputes": True,
        "length": 256,
        "num_parameters": 4 * _MIB,
        "lowering_s": 1.25,
        "compile_s": 20.0,
        "argument_bytes": 10 * _MIB,
        "temporary_bytes": 2 * _MIB,
        "messages": {"all-gather": 6.0, "reduce-scatter": 3.0, "all-reduce": 1.0},
        "message_bytes": {"all-gather": 5 * _MIB, "reduce-scatter": 2 * _MIB, "all-reduce": _MIB},
        **fields,
    }


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_row_has_memory_messages_and_times() -> None:
    header, rule, row = make_table([_facts()]).splitlines()
    assert len(_cells(header)) == len(_cells(rule)) == len(_cells(row))
    assert _cells(row) == [
        *("6 layers", "v5e:2x4", "float32", "recomputed", "JAX"),
        *("10", "2", "0.50", "6", "3", "1", "5", "3", "1.2", "20.0"),
    ]


def test_refused_program_has_the_memory_that_it_would_use() -> None:
    facts = _facts(refusal="RESOURCE_EXHAUSTED", used_bytes=30 * 2**30)
    for name in ("argument_bytes", "temporary_bytes", "messages", "message_bytes"):
        del facts[name]
    row = make_table([facts]).splitlines()[2]
    assert "refused: 30,720 in all" in _cells(row)


def test_earlier_results_are_beside_the_new_of_the_same_form() -> None:
    ours = _facts(side="shard_state=all")
    earlier = [_facts(side="shard_state=all", temporary_bytes=7 * _MIB), _facts(dtype="float32")]
    rows = make_table([ours, _facts(dtype="mixed_bfloat16")], earlier).splitlines()[2:]
    assert [(_cells(row)[2], _cells(row)[4], _cells(row)[6]) for row in rows] == [
        ("float32", "shard_state=all", "2"),
        ("float32", "before", "7"),
        ("mixed_bfloat16", "JAX", "2"),
    ]


def test_results_of_a_folder_are_sorted_by_depth_and_side(tmp_path: Path) -> None:
    found = [
        _facts(decoder="12 layers"),
        _facts(),
        _facts(side="shard_state=all"),
    ]
    for number, facts in enumerate(found):
        (tmp_path / f"{number}.json").write_text(json.dumps(facts))
    (tmp_path / "parts.json").write_text(json.dumps({"name": 0}))
    results = read_results(tmp_path)
    assert [(one["decoder"], one["side"]) for one in results] == [
        ("6 layers", "shard_state=all"),
        ("6 layers", "JAX"),
        ("12 layers", "JAX"),
    ]


def test_picture_is_drawn_of_equal_layers_only(tmp_path: Path) -> None:
    draw(tmp_path / "none.png", [_facts(decoder="7B")])
    assert not (tmp_path / "none.png").exists()
    results = [_facts(), _facts(decoder="12 layers"), _facts(recomputes=False)]
    draw(tmp_path / "some.png", results, [_facts(side="shard_state=all")])
    assert (tmp_path / "some.png").stat().st_size > 10_000
