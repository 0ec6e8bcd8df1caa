"""`stratagem plan`: output, files, plots and exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import Result

from stratagem import environment
from stratagem.cli import main
from tests.command_runner import CliRunner
from tests.unit.observe.profiling.fabricated import two_steps, write

_LOOP = Path(__file__).parents[1] / "planning" / "programs" / "loop.py"
_LARGE = _LOOP.with_name("large.py")
_DIGITS = Path(__file__).parents[3] / "examples" / "01_train_digits.py"


def _call(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["plan", *map(str, arguments)])


@pytest.mark.slow
def test_tables_json_and_picture(tmp_path) -> None:
    json_file, picture = tmp_path / "a" / "plan.json", tmp_path / "b" / "plan.png"
    result = _call(_LOOP, "--target", "4xH100", "--output", json_file, "--plot", picture)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(
        "loop.py on 4xH100: 32 parameters, global batch 24, 6 per device"
    )
    for title in ("Memory per device", "Communication per step", "Predicted step time"):
        assert title in result.stdout
    assert "replicas 4" in result.stderr  # the script's own
    written = json.loads(json_file.read_text())
    assert (written["target"], written["memory"]["parameters_bytes"]) == ("4xH100", 128)
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_links_are_given_and_mapped(tmp_path) -> None:
    picture = tmp_path / "a" / "map.png"
    links = ("--network-bytes-per-s", "1e6", "--network-latency-s", "0.05")
    result = _call(_LOOP, "--target", "16xH100", "--json", *links, "--link-map", picture)
    assert result.exit_code == 0, result.output
    assumed = json.loads(result.stdout)["assumptions"]
    assert (assumed["network_bytes_per_s"], assumed["network_latency_s"]) == (1e6, 0.05)
    assert assumed["link_bytes_per_s"] is None
    assert picture.read_bytes().startswith(b"\x89PNG")
    alone = _call(_LOOP, "--target", "4xH100", "--link-map", picture)
    assert alone.exit_code == 1
    assert "larger target" in alone.output
    assert _call(_LOOP, "--target", "16xH100", "--network-latency-s", "0").exit_code == 2


def test_json_is_what_the_file_has(tmp_path) -> None:
    json_file = tmp_path / "plan.json"
    result = _call(_LOOP, "--target", "4xH100", "--json", "--output", json_file)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == json.loads(json_file.read_text())
    assert "replicas 4" in result.stderr  # the script's own


def test_comparison_with_a_profile(tmp_path) -> None:
    json_file = tmp_path / "plan.json"
    write(tmp_path / "a" / "vm.xplane.pb", two_steps())
    arguments = ("--target", "4xH100", "--output", json_file, "--profile", tmp_path / "a")
    result = _call(_LOOP, *arguments)
    assert result.exit_code == 0, result.output
    assert "Predicted and measured step" in result.stdout
    parts = json.loads(json_file.read_text())["comparison"]["parts"]
    assert parts[-1]["name"] == "step"
    assert parts[-1]["measured_s"] == pytest.approx(1e-6)
    missing = _call(_LOOP, "--target", "4xH100", "--profile", tmp_path / "missing")
    assert missing.exit_code == 1
    assert "does not exist" in missing.stderr


def test_another_global_batch() -> None:
    result = _call("--target", "2xH100", "--global-batch", 64, _LOOP)
    assert result.exit_code == 0, result.output
    assert "global batch 64, 32 per device" in result.stdout
    assert "The batch of 64 replaces the script's." in result.stdout


@pytest.mark.parametrize("options", [pytest.param([], marks=pytest.mark.slow), ["--workers"]])
def test_state_that_the_script_does_not_share_out(options, tmp_path) -> None:
    json_file = tmp_path / "plan.json"
    shared = ("--shard-state", "all", "--output", json_file)
    result = _call("--target", "2xH100", *shared, _LARGE, *options)
    assert result.exit_code == 0, result.output
    assert "large.py on 2xH100, shard_state=all: 16.4 k parameters" in result.stdout
    assert "evaluated 0.0" in result.stderr  # nothing was computed
    written = json.loads(json_file.read_text())
    assert (written["shard_state"], written["memory"]["parameters_bytes"]) == (
        "all",
        4 * 128 * 128 // 2,
    )


def test_copies_of_sharded_state(tmp_path) -> None:
    json_file = tmp_path / "plan.json"
    shared = ("--shard-state", "all", "--shard-size", 2, "--output", json_file)
    result = _call("--target", "4xH100", *shared, _LARGE)
    assert result.exit_code == 0, result.output
    written = json.loads(json_file.read_text())
    assert written["memory"]["parameters_bytes"] == 4 * 128 * 128 // 2


def test_search(tmp_path) -> None:
    json_file = tmp_path / "a" / "search.json"
    result = _call("--target", "2xH100", "--search", 2, "--output", json_file, _LARGE)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("large.py on 2xH100, global batch 16: the best 2 of ")
    assert "1  strategy = sg.MirroredStrategy()" in result.stdout
    written = json.loads(json_file.read_text())
    assert next(one["code"] for one in written["choices"]) == "strategy = sg.MirroredStrategy()"
    own_loop = _call("--target", "2xH100", "--search", 2, _LOOP)
    assert own_loop.exit_code == 1
    assert "trains with a function of its own" in own_loop.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([_LARGE, "--target", "4xH100", "--shard-state", "all", "--shard-size", "3"], "a divisor"),
        ([_LOOP, "--target", "8xH101"], "is not a known machine"),
        ([_LOOP, "--target", "2xH100", "--never"], "before it trained"),
        (
            [_LOOP, "--target", "2xH100", "--global-batch", "3"],
            "of 3 cannot be split over 2 replicas",
        ),
        ([_LARGE, "--target", "2xH100", "--shard-state", "all", "--central"], "was requested, but"),
        (["nowhere.py", "--target", "2xH100"], "Script 'nowhere.py' does not exist"),
    ],
)
def test_mistakes_end_with_exit_code_1(arguments, message) -> None:
    result = _call(*arguments)
    assert (result.exit_code, result.stdout) == (1, "")
    assert message in result.stderr


def test_target_is_required() -> None:
    result = _call(_LOOP)
    assert result.exit_code == 2
    assert "--target" in result.stderr


@pytest.mark.slow
def test_example_in_a_process_of_its_own(tmp_path) -> None:
    """It asks JAX for two CPU devices, which only a fresh process can have."""
    ended = subprocess.run(
        [
            *(sys.executable, "-c", "from stratagem.cli import main; main()", "plan", _DIGITS),
            *("--strategy", "mirrored", "--target", "8xH100", "--output", tmp_path / "plan.json"),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
        env=environment.snapshot(),
    )
    assert ended.returncode == 0, ended.stderr
    assert (
        "01_train_digits.py on 8xH100: 66 k parameters, global batch 128, 16 per device"
        in ended.stdout
    )
    written = json.loads((tmp_path / "plan.json").read_text())
    assert written["memory"]["parameters_bytes"] == 4 * 65_994
