"""Samples of memory, by a thread of their own."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from stratagem.observe.run_events import process_writer as memory_sampler
from stratagem.observe.run_events.process_writer import MemorySampler, resident_bytes
from stratagem.observe.run_events.reader import read_run
from stratagem.observe.run_events.records import EndEvent, MemoryEvent
from stratagem.observe.run_events.writer import EventWriter

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def samples(folder) -> list[MemoryEvent]:
    (process,) = read_run(folder).processes
    return [event for event in process.events if isinstance(event, MemoryEvent)]


def test_samples_are_written_until_the_stop(tmp_path) -> None:
    third = threading.Event()

    class Counting(EventWriter):
        count = 0

        def memory(self, *arguments, **keywords) -> None:
            super().memory(*arguments, **keywords)
            self.count += 1
            if self.count == 3:
                third.set()

    with Counting(tmp_path, "worker", 0, num_processes=1) as writer:
        sampler = MemorySampler(writer, interval_s=0.01)
        assert third.wait(120)
        sampler.stop()
        assert not sampler._thread.is_alive()
    found = samples(tmp_path)
    assert len(found) >= 3
    assert found[0].device_bytes is None


class HeldWriter(EventWriter):
    """Holds each sample until `release` is set."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "worker", 0, num_processes=1)
        self.is_sampling = threading.Event()
        self.release = threading.Event()

    def memory(self, *arguments, **keywords) -> None:
        self.is_sampling.set()
        assert self.release.wait(120)
        super().memory(*arguments, **keywords)


def test_stop_waits_for_the_sample_in_progress(tmp_path) -> None:
    with HeldWriter(tmp_path) as writer:
        sampler = MemorySampler(writer, interval_s=1e6)
        assert writer.is_sampling.wait(120)
        threading.Timer(0.05, writer.release.set).start()
        sampler.stop()
        writer.end()
    (process,) = read_run(tmp_path).processes
    assert [type(event) for event in process.events[-2:]] == [MemoryEvent, EndEvent]


def test_sample_that_is_late_is_dropped(tmp_path, monkeypatch) -> None:
    """A device that hangs holds up the end for the limit only."""
    monkeypatch.setattr(memory_sampler, "STOP_LIMIT_S", 0.01)
    with HeldWriter(tmp_path) as writer:
        sampler = MemorySampler(writer, interval_s=1e6)
        assert writer.is_sampling.wait(120)
        sampler.stop()
        writer.end()
        writer.release.set()
        sampler._thread.join(120)
    (process,) = read_run(tmp_path).processes
    assert isinstance(process.events[-1], EndEvent)


def test_memory_of_devices_is_in_the_sample(tmp_path) -> None:
    with EventWriter(tmp_path, "worker", 0, num_processes=1) as writer:
        sampler = MemorySampler(writer, interval_s=1e6)
        sampler.device_memory = lambda: (12, 34)
        sampler.sample()
        sampler.stop()
        sampler._thread.join(120)
    assert (12, 34) in [(one.device_bytes, one.device_limit_bytes) for one in samples(tmp_path)]


def test_resident_memory_is_what_the_kernel_says(tmp_path, monkeypatch) -> None:
    """Of this process: some of what it has asked for, and never more."""
    resident = resident_bytes()
    assert resident is not None
    assert 0 < resident < int(Path("/proc/self/statm").read_text().split()[0]) * PAGE_BYTES
    (tmp_path / "statm").write_text("2000 250 30 4 0 900 0\n")
    monkeypatch.setattr(memory_sampler, "_STATM", tmp_path / "statm")
    assert resident_bytes() == 250 * PAGE_BYTES


def test_system_without_proc_reports_nothing(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(memory_sampler, "_STATM", tmp_path / "none")
    assert resident_bytes() is None
