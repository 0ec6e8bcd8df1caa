"""Compression of a job: as asked for, or as the consumers' links need."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from stratagem.input.service.worker_job import ConsumerWishes


def _fields(consumer: str, compression: str | None, num_joined: int = 1) -> dict[str, Any]:
    return {
        "consumer": consumer,
        "compression": compression,
        "trainer": f"of {consumer}",
        "num_joined": num_joined,
    }


def test_auto_compresses_while_a_consumer_is_far_away() -> None:
    pytest.importorskip("zstandard")
    wishes = ConsumerWishes("AUTO")
    assert not wishes.is_compressed
    wishes.note(_fields("near", None))
    assert not wishes.is_compressed
    wishes.note(_fields("far", "zstd"))
    assert wishes.is_compressed
    wishes.keep(["near"], 0)  # sent before anyone had joined
    assert wishes.is_compressed
    wishes.keep(["near"], 1)
    assert not wishes.is_compressed
    wishes.note(_fields("near", "zstd"))
    assert wishes.is_compressed
    wishes.note(_fields("near", None))
    assert not wishes.is_compressed
    assert wishes.trainer_of("near") == "of near"


def test_auto_does_without_the_library(monkeypatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    wishes = ConsumerWishes("AUTO")
    wishes.note(_fields("far", "zstd"))
    assert not wishes.is_compressed


def test_compression_by_name_needs_the_library(monkeypatch) -> None:
    wishes = ConsumerWishes(None)
    wishes.note(_fields("far", "zstd"))
    assert not wishes.is_compressed
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ImportError, match="compression of batches needs zstandard"):
        ConsumerWishes("zstd")
