"""End of a run on parameter servers: its file, and the cause that an early end has to name."""

from __future__ import annotations

import json

import pytest

from validation.chaos.faults.kinds import Fault
from validation.chaos.jobs import Ended
from validation.chaos.jobs.parameter_servers import RUN, names_cause, read_final


def test_end_of_a_run_is_read(tmp_path) -> None:
    cell = {"kind": "push", "counts": [1.0, 0.0], "servers": [0, 1]}
    fields = {
        "cells": {"first": cell},
        "reported": {"push": {"applied": 1, "lost": 0, "repeated": 0}},
        "metric": 2.0,
        "register": 1.0,
        "cut_servers": [1],
        "run": 2,
    }
    (tmp_path / "final.json").write_text(json.dumps(fields))
    final = read_final(tmp_path / "final.json")
    assert final.cells["first"].counts == {0: 1.0, 1: 0.0}
    assert final.cells["first"].servers == {0: 0, 1: 1}
    assert (final.metric, final.register, final.cut_servers) == (2.0, 1.0, {1})
    assert final.first_function == 2 * RUN


@pytest.mark.parametrize(
    ("kind", "where", "causes", "code", "output", "names"),
    [
        ("SIGTERM", "coordinator", "SIGTERM", -15, "", True),
        ("SIGTERM", "worker 0", "SIGTERM", -15, "", False),
        ("SIGINT", "coordinator", "SIGINT", 130, "", True),
        ("disk full", "the job's folder", "No space left", 1, "OSError: No space left", True),
        ("disk full", "the job's folder", "No space left", 1, "KeyError: 3", False),
        ("garbage", "server 0", "", 1, "KeyError: 3", False),
        ("delay", "100kbit", "refused", 1, "server 0 gave no answer for 4 s", True),
        ("SIGINT", "worker 0", "SIGINT", 1, "server 0 gave no answer for 4 s", False),
        ("SIGINT", "fork server", "SIGINT", 1, "server 0 gave no answer for 4 s", True),
        ("SIGINT", "fork server", "SIGINT", 1, "KeyError: 3", False),
    ],
)
def test_early_end_names_the_cause(kind, where, causes, code, output, names) -> None:
    fault = Fault(kind=kind, where=where, causes=causes)
    assert names_cause(Ended(code, output), [fault]) == names
