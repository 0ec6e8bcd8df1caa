"""Traces found in folders, with the layers written beside them."""

from __future__ import annotations

from pathlib import Path

import pytest

from stratagem.observe.profiling.recorder import find_traces, read_profile, read_profiles
from tests.unit.observe.profiling.fabricated import OPERATIONS, two_steps, write


def _trace(folder: Path, worker: int, time: str, operations: object = None) -> Path:
    path = folder / f"worker-{worker}" / "plugins" / "profile" / time / "vm.xplane.pb"
    return write(path, two_steps(), operations)


def test_latest_profile_of_each_worker(tmp_path) -> None:
    _trace(tmp_path, 0, "2026_01_01_10_00_00")
    latest = _trace(tmp_path, 0, "2026_01_01_11_00_00")
    other = _trace(tmp_path, 1, "2026_01_01_10_30_00")
    assert find_traces(tmp_path) == [latest, other]
    assert list(read_profiles(tmp_path)) == [latest, other]
    assert find_traces(latest.parent) == [latest]


def test_file_and_the_one_for_perfetto_beside_it(tmp_path) -> None:
    trace = _trace(tmp_path, 0, "a", OPERATIONS)
    beside = trace.with_name("vm.trace.json.gz")
    beside.write_bytes(b"")
    for path in (trace, beside, tmp_path, str(tmp_path)):
        assert read_profile(path).operations[0].layer == "model/dense"


def test_trace_of_another_tool_has_no_layers(tmp_path) -> None:
    assert read_profile(_trace(tmp_path, 0, "a")).operations[0].layer == ""


def test_several_workers_are_no_single_profile(tmp_path) -> None:
    _trace(tmp_path, 0, "a")
    _trace(tmp_path, 1, "a")
    with pytest.raises(ValueError, match="has traces of 2 workers") as caught:
        read_profile(tmp_path)
    assert "worker-1" in str(caught.value)


@pytest.mark.parametrize(("name", "why"), [("", "has no trace"), ("missing", "does not exist")])
def test_folder_without_a_trace(name, why, tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match=rf"{why}\.\nExpected a \.xplane\.pb file"):
        find_traces(tmp_path / name)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"programs": {"jit_step": {"dot": ["a"]}}}',
        '{"programs": {}, "host": {"processor_s": 1.0}}',
        '{"programs": {}, "host": {"processor_s": "?", "num_cores": 2}}',
    ],
)
def test_damaged_layers_are_an_error(text, tmp_path) -> None:
    trace = _trace(tmp_path, 0, "a")
    trace.with_name("operations.json").write_text(text)
    with pytest.raises(ValueError, match=r"operations\.json cannot be read"):
        read_profile(trace)
