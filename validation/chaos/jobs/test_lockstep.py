"""Verdicts on lockstep training: a seeded wrong weight, a hang and an error without cause."""

from __future__ import annotations

import numpy as np
import pytest

from validation.chaos.faults.kinds import Fault
from validation.chaos.jobs import Ended
from validation.chaos.jobs.lockstep import RunningFit, difference
from validation.chaos.sandbox import Sandbox

_WEIGHTS = {"arr_0": np.arange(4, dtype="float32"), "arr_1": np.ones((), "int32")}
_FULL = Fault(kind="disk full", where="here", ends=True, causes="No space left")


_KILLED = Fault(kind="SIGKILL", where="launcher", ends=True)


class _Judged(RunningFit):
    """A job whose next launch always resumes."""

    def __post_init__(self) -> None:
        pass

    def _resumed(self, first, faults):
        return self._compared()


def _job(tmp_path, weights, *, is_exact: bool = True) -> RunningFit:
    np.savez(tmp_path / "end-0.npz", **weights)
    sandbox = Sandbox(tree=tmp_path, work=tmp_path, notes=tmp_path, home=tmp_path, is_disk=False)
    return _Judged(sandbox, [], {}, _WEIGHTS, is_exact)


def _next_after(weights):
    return weights | {"arr_0": np.nextafter(weights["arr_0"], np.float32(9))}


def test_last_bit_is_compared(tmp_path) -> None:
    assert _job(tmp_path, _WEIGHTS).verdict(Ended(0, ""), []).kind == "identical"
    judged = _job(tmp_path, _next_after(_WEIGHTS)).verdict(Ended(0, ""), [])
    assert (judged.kind, judged.why[:24]) == ("wrong", "end-0.npz: arr_0 differs")


def test_rounding_is_promised_where_workers_are_lost(tmp_path) -> None:
    job = _job(tmp_path, _next_after(_WEIGHTS), is_exact=False)
    assert job.verdict(Ended(0, ""), []).kind == "promised"
    for wrong in ({"arr_1": np.zeros((), "int32")}, {"arr_0": _WEIGHTS["arr_0"] * 1.001}):
        judged = _job(tmp_path, _WEIGHTS | wrong, is_exact=False).verdict(Ended(0, ""), [])
        assert judged.kind == "wrong"


@pytest.mark.parametrize(
    ("code", "output", "faults", "kind"),
    [
        (None, "", [], "hang"),
        (1, "OSError: No space left on device", [_FULL], "identical"),
        (1, "KeyError: 'x'", [_FULL], "unnamed"),
        (1, "OSError: No space left on device", [], "wrong"),
        (-9, "", [_KILLED], "identical"),
        (143, "", [_KILLED], "unnamed"),
    ],
)
def test_error_has_to_name_its_cause(tmp_path, code, output, faults, kind) -> None:
    assert _job(tmp_path, _WEIGHTS).verdict(Ended(code, output), faults).kind == kind


def test_missing_weights_differ() -> None:
    assert difference({}, _WEIGHTS, is_exact=True) == "0 values in place of 2"
