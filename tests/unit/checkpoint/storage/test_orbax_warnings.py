"""Orbax's log warnings as causes of its errors."""

from __future__ import annotations

import logging

from stratagem.checkpoint.storage.files import OrbaxWarnings, collect_warnings


def test_errors_in_warnings_are_kept_once_and_not_printed(caplog) -> None:
    collected = OrbaxWarnings()
    with collect_warnings(collected):
        for _ in range(2):
            try:
                raise KeyError("shard 3")
            except KeyError:
                logging.getLogger("absl").warning("cannot read", exc_info=True)
        logging.getLogger("asyncio").error("no error with it")
        logging.getLogger("elsewhere").warning("passes")
    assert collected.causes == ["KeyError: 'shard 3'"]
    assert [record.message for record in caplog.records] == ["passes"]


def test_afterwards_warnings_go_their_way_again(caplog) -> None:
    with collect_warnings(OrbaxWarnings()):
        pass
    logging.getLogger("absl").warning("printed")
    assert "printed" in caplog.text
