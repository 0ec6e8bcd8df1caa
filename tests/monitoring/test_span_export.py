"""Spans as an exporter of OpenTelemetry receives them."""

from __future__ import annotations

import pytest

from stratagem import environment as optional_libraries
from stratagem.observe.monitoring.span_export import SpanExport
from tests.goodput.runs import EPOCH_S, end, gang_restart, members, process, run, save, straggling

sdk = pytest.importorskip("opentelemetry.sdk.trace")
export = pytest.importorskip("opentelemetry.sdk.trace.export")
in_memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")


def spans(events, folder="runs/digits") -> list:
    memory = in_memory.InMemorySpanExporter()
    provider = sdk.TracerProvider()
    provider.add_span_processor(export.SimpleSpanProcessor(memory))
    spans_of_run = SpanExport(folder, provider)
    for one in events.processes:
        spans_of_run.add(one)
    return list(memory.get_finished_spans())


def length_s(span) -> float:
    return (span.end_time - span.start_time) / 1e9


def test_checkpoints_and_start_ups_have_a_length() -> None:
    events = run(process("worker 0", 0, *straggling().processes[0].events[1:3], *save(20, 24, 7)))
    found = {span.name: span for span in spans(events)}
    assert length_s(found["start-up"]) == pytest.approx(10)
    assert length_s(found["checkpoint"]) == pytest.approx(4)
    assert found["checkpoint"].end_time == pytest.approx((EPOCH_S + 24) * 1e9)
    assert found["checkpoint"].attributes["stratagem.step"] == 7
    assert found["checkpoint"].attributes["stratagem.process"] == "worker 0"


def test_change_of_members_is_as_long_as_its_pause() -> None:
    events = run(process("worker 0", 0, members(8, 1, 2, lost="1 3", pause_s=1.5)))
    (change,) = [span for span in spans(events) if span.name == "members"]
    assert length_s(change) == pytest.approx(1.5)
    assert change.attributes["stratagem.lost"] == "worker 1, worker 3"
    assert "stratagem.joined" not in change.attributes


def test_failures_are_errors_and_other_events_are_not() -> None:
    found = spans(gang_restart())
    errors = [
        span.name for span in found if not span.status.is_ok and span.status.status_code.value
    ]
    assert sorted(errors) == ["failure", "process ended"]
    (restarted,) = [span for span in found if span.name == "restart"]
    assert restarted.attributes["stratagem.cause"] == "worker 1 failed"
    assert length_s(restarted) == 0


def test_failed_checkpoint_is_an_error() -> None:
    found = spans(run(process("worker 0", 0, *save(2, 3, 1, failed="disk full"), end(4))))
    (saved,) = [span for span in found if span.name == "checkpoint"]
    assert saved.status.status_code.name == "ERROR"
    assert saved.attributes["stratagem.failed"] == "disk full"


def test_all_spans_of_a_folder_are_one_trace() -> None:
    def traces(folder: str) -> set[int]:
        return {span.context.trace_id for span in spans(gang_restart(), folder)}

    assert len(traces("runs/a")) == 1
    assert traces("runs/a") == traces("runs/a") != traces("runs/b")


def test_values_are_attributes_and_lines_of_steps_and_memory_are_left_out() -> None:
    found = spans(straggling())
    progress = [span for span in found if span.name == "progress"]
    assert progress[0].attributes["stratagem.values.loss"] == 2.0
    assert {span.name for span in found} == {
        "process started",
        "start-up",
        "progress",
        "warning",
        "process ended",
    }


def test_missing_library_is_named(monkeypatch) -> None:
    def without(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(optional_libraries, "importlib", type("", (), {"import_module": without}))
    with pytest.raises(ImportError, match=r"(?s)OpenTelemetry needs.*stratagem\[observe\]"):
        SpanExport("runs/digits")
