"""Speeds beside those of the hardware; failures with the command that shows them whole."""

from __future__ import annotations

import re

import pytest

from stratagem.cli.doctor.settings import Level
from stratagem.cli.selftest import trial
from stratagem.cli.selftest.measurements import MEASUREMENTS


def test_every_measurement_is_run() -> None:
    assert tuple(MEASUREMENTS) == trial.NAMES


@pytest.mark.slow
@pytest.mark.parametrize("name", trial.NAMES)
def test_speed_is_shown_beside_the_hardware(name: str, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (finding,) = trial.measure([name])
    assert finding.level is Level.OK, finding.text
    rates = [float(rate) for rate in re.findall(r"([\d.]+) GB/s", finding.text)]
    assert len(rates) == 2
    assert all(rate > 0 for rate in rates)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_failure_names_the_command_that_shows_it_whole() -> None:
    (finding,) = trial.measure(["levitation"])
    assert finding.level is Level.ERROR
    assert "KeyError: 'levitation'" in finding.text
    assert "stratagem.cli.selftest.measurements levitation" in finding.fix


def test_hang_is_a_failure() -> None:
    (finding,) = trial.measure(["collective"], limit_s=0.05)
    assert finding.text == "collective failed: not finished after 0 s"
