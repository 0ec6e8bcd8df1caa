"""What Orbax logs while it fails."""

from __future__ import annotations

import logging

from stratagem.storage.warnings_of_orbax import Collected, collected_warnings


def test_errors_in_warnings_are_kept_once_and_not_printed(caplog) -> None:
    collected = Collected()
    with collected_warnings(collected):
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
    with collected_warnings(Collected()):
        pass
    logging.getLogger("absl").warning("printed")
    assert "printed" in caplog.text
