"""A description as text, HTML and numbers."""

from __future__ import annotations

import dataclasses

from stratagem.strategies.base.self_description import (
    DescribedDevice,
    DescribedTransfer,
    StoredVariableSize,
    StrategyDescription,
)
from tests.unit.test_rendering import require_plain


def _description(num_variables: int = 2, num_devices: int = 2) -> StrategyDescription:
    names = [f"cpu:{index}" for index in range(num_devices)]
    variables = [
        StoredVariableSize(
            f"<{n}>/kernel[0]", (n, 4), "float32", "copy per replica", 16 * n, {names[0]: 16 * n}
        )
        for n in range(1, num_variables + 1)
    ]
    total = sum(one.num_bytes for one in variables)
    return StrategyDescription(
        title="Some(<devices>)",
        num_replicas=num_devices,
        devices=[
            DescribedDevice(name, index, total if not index else 0)
            for index, name in enumerate(names)
        ],
        variables=variables,
        transfers=[
            DescribedTransfer("all-reduce", "gradients", 2048, 3072),
            DescribedTransfer("exchange of rows", "rows", None, None),
        ],
        programs={"fit": 1, "step": 12},
    )


def test_text_has_every_number() -> None:
    described = _description()
    assert str(described).splitlines() == [
        "Some(<devices>): 2 replicas",
        "",
        "Devices",
        "device   replica   variables",
        "────────────────────────────",
        "cpu:0    0              48 B",
        "cpu:1    1               0 B",
        "all                     48 B",
        "",
        "Variables",
        "variable        shape    dtype     stored as          size   in all",
        "───────────────────────────────────────────────────────────────────",
        "<2>/kernel[0]   (2, 4)   float32   copy per replica   32 B     32 B",
        "<1>/kernel[0]   (1, 4)   float32   copy per replica   16 B     16 B",
        "all 2                                                 48 B     48 B",
        "",
        "Sent in each training step",
        "how                arrays          size   sent by a replica",
        "───────────────────────────────────────────────────────────",
        "all-reduce         gradients    2.0 KiB             3.0 KiB",
        "exchange of rows   rows        by batch            by batch",
        "",
        "Compiled programs",
        "function   times",
        "────────────────",
        "fit            1",
        "step          12",
    ]
    assert repr(described) == str(described)


def test_html_has_the_same_tables() -> None:
    texts = require_plain(_description()._repr_html_()).texts
    assert texts[:2] == ["Some(<devices>): 2 replicas", "Devices"]
    assert [texts.count(name) for name in ("cpu:0", "<2>/kernel[0]", "by batch", "12")] == [
        1,
        1,
        2,
        1,
    ]


def test_many_rows_are_left_out_and_counted() -> None:
    described = _description(num_variables=1000, num_devices=100)
    lines = str(described).splitlines()
    assert len(lines) < 120
    assert lines.count("... 60 more") == lines.count("... 960 more") == 1
    assert any(line.startswith("<1000>/kernel[0]") for line in lines)  # the largest are shown
    assert not any(line.startswith("<1>/kernel[0]") for line in lines)
    assert described.variable_bytes == described.stored_bytes == 16 * 500_500


def test_nothing_yet() -> None:
    described = StrategyDescription(
        title="New", num_replicas=1, devices=[], variables=[], transfers=[], programs={}
    )
    lines = str(described).splitlines()
    assert lines[0] == "New: 1 replica"
    assert any(line.startswith("nothing") for line in lines)
    assert any(line.startswith("none") for line in lines)
    require_plain(described._repr_html_())


def test_transfer_of_some_steps_says_how_many() -> None:
    transfer = DescribedTransfer("all-reduce", "changes of weights", 4096, 82, every_steps=50)
    described = dataclasses.replace(_description(), transfers=[transfer])
    assert "all-reduce, every 50 steps   changes of weights   4.0 KiB" in str(described)
