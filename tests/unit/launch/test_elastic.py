"""Discovery of available workers, and waiting for them."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

import stratagem as sg
from stratagem.errors import UnavailableError
from stratagem.launch import options as elastic
from stratagem.launch.options import Discovery
from tests.unit.launch.test_scripts import WAIT


@pytest.fixture(autouse=True)
def asked_at_once(monkeypatch) -> None:
    monkeypatch.setattr(elastic, "_DISCOVER_EVERY_S", 0.0)
    monkeypatch.setattr(elastic, "_POLL_S", 0.0)


def answers(*numbers: int) -> Iterator[int]:
    yield from numbers
    while True:
        yield numbers[-1]


def discovery(*numbers: int, least: int = 2, full: int = 4) -> Discovery:
    counts = answers(*numbers)
    return Discovery(sg.ElasticConfig(least, full, lambda: next(counts)), full)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((0,), ValueError, "min_workers=0 and max_workers=None are not a valid range"),
        ((3, 2), ValueError, "min_workers=3 and max_workers=2 are not a valid range"),
        (("2",), TypeError, "min_workers='2' is of type str"),
        ((1, True), TypeError, "max_workers=True is of type bool"),
        ((1, 2, 4), TypeError, "discover=4 is not callable"),
    ],
)
def test_wrong_configuration_is_refused(arguments, error, words) -> None:
    with pytest.raises(error, match=words):
        sg.ElasticConfig(*arguments)


def test_as_many_start_as_can_run_when_they_are_enough(monkeypatch) -> None:
    assert discovery(0, 1, 3).wait(4, lambda: False) == 3
    assert discovery(9).wait(2, lambda: False) == 4
    assert discovery(0).wait(4, lambda: True) == 0  # the waiting has become useless
    unknown = Discovery(sg.ElasticConfig(2, 4), 4)  # where nobody knows, as many as are wanted
    assert unknown.num_workers() is None
    assert unknown.wait(3, lambda: False) == 3
    monkeypatch.setattr(elastic, "_DISCOVER_EVERY_S", 1000.0)
    once = discovery(3, 4)  # the function is not asked all the time
    assert [once.num_workers() for _ in range(3)] == [3, 3, 3]


def test_too_few_for_too_long_are_named_with_the_setting(monkeypatch) -> None:
    monkeypatch.setenv("STRATAGEM_JOIN_TIMEOUT_S", "0.01")
    words = (
        r"1 of at least 3 workers can run; worker 1, worker 2 did not return within "
        r"0\.01 s\.(?s:.)*STRATAGEM_JOIN_TIMEOUT_S"
    )
    with pytest.raises(UnavailableError, match=words):
        discovery(1, least=3).wait(4, lambda: False)


def test_training_follows_the_workers_that_there_are(script, capfd) -> None:
    """Two, then three, who leave when they are asked to or are done."""
    path = script(
        f"""
        count = len(json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"])
        sys.stdout.write(f"one of {{count}}\\n")
        if count < 3:
            {WAIT}
        """
    )
    counts = answers(2, 2, 3)
    config = sg.ElasticConfig(1, 3, lambda: next(counts))
    sg.launch.run(path, workers=2, rejoin_after_s=0.2, elastic=config)
    out, err = capfd.readouterr()
    assert out.count("one of 3\n") == 3
    assert out.count("one of 2\n") <= 2  # they may be asked before they have printed
    assert "[launch] There are 3 of 3 workers now.\n" in err


def test_nothing_starts_with_too_few(script, monkeypatch, folder) -> None:
    monkeypatch.setenv("STRATAGEM_JOIN_TIMEOUT_S", "0.01")
    config = sg.ElasticConfig(2, 4, lambda: 1)
    with pytest.raises(UnavailableError, match="1 of at least 2 workers can run"):
        sg.launch.run(script("open('started', 'w')"), workers=2, elastic=config)
    assert not (folder / "started").exists()


def test_signal_ends_the_waiting(script) -> None:
    program = f"""
import os, signal
import stratagem as sg
def discover():
    os.kill(os.getpid(), signal.SIGTERM)
    return 0
try:
    sg.launch.run({script("print('started')")!r}, elastic=sg.ElasticConfig(1, 2, discover))
finally:
    print("here")
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60
    )
    assert (ended.returncode, ended.stdout) == (-signal.SIGTERM, "")
