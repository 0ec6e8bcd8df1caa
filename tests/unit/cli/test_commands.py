"""Habits of all commands: verbosity, JSON, suggestions, colors, Ctrl-C."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import Result

from stratagem import environment
from stratagem import errors as exit_codes
from stratagem.cli import explain, main
from stratagem.cli.commands import Commands, chosen_log_level, json_option, print_json
from tests.architecture.test_light_imports import first_that_is_heavy
from tests.command_runner import CliRunner
from tests.unit.cli.migrate.programs import SG
from tests.unit.observe.runs import gang_restart
from tests.unit.observe.runs import write as write_of_goodput
from tests.unit.test_logs import root_handlers


@click.group(cls=Commands)
def example() -> None:
    """Commands of these tests."""


@example.command()
@click.argument("action", default="log")
@json_option
def act(action: str, *, as_json: bool) -> None:
    """Log, warn, fail or be interrupted."""
    if action == "log":
        logging.getLogger("stratagem.cli.example").info("progress")
        warnings.warn("a warning", RuntimeWarning, stacklevel=1)
        if as_json:
            print_json({"level": chosen_log_level()})
    elif action == "fail":
        try:
            raise LookupError("no run")
        except LookupError as error:
            raise click.ClickException("The run is missing.") from error
    else:
        raise KeyboardInterrupt


def _call(*arguments: str) -> Result:
    with root_handlers(), warnings.catch_warnings():
        warnings.simplefilter("always")
        return CliRunner().invoke(example, ["act", *arguments])


def leaves(group: click.Group, prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from leaves(command, (*prefix, name))
        else:
            yield (*prefix, name)


@pytest.mark.parametrize("words", list(leaves(main)), ids=" ".join)
def test_every_command_takes_both_options(words) -> None:
    result = CliRunner().invoke(main, [*words, "--help"])
    assert result.exit_code == 0
    for option in ("-v, --verbose", "-q, --quiet"):
        assert result.output.count(option) == 1


def test_verbosity_lasts_as_long_as_the_command() -> None:
    assert "progress" not in _call().stderr
    for option in ("-v", "-vv"):
        assert "INFO progress" in _call(option).stderr
    assert _call("-q").stderr == ""
    levels = [json.loads(_call("--json", *one).stdout)["level"] for one in (["-vv"], ["-q"], [])]
    assert levels == ["debug", "error", None]
    result = _call("-v", "-q")
    assert result.exit_code == exit_codes.USAGE
    assert "-v and -q contradict each other" in result.stderr


def test_cause_of_an_error_is_shown_with_v() -> None:
    assert _call("fail").stderr == "Error: The run is missing.\n"
    result = _call("fail", "-v")
    assert result.exit_code == exit_codes.FAILURE
    assert "LookupError: no run" in result.stderr
    assert result.stderr.endswith("Error: The run is missing.\n")


def test_interrupt_exits_as_shells_do() -> None:
    result = _call("interrupt")
    assert (result.exit_code, result.stderr) == (exit_codes.INTERRUPTED, "Interrupted.\n")


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["device"], " Did you mean 'devices'?"),
        (["slurm", "rendre"], " Did you mean 'render'?"),
        (["xyzzy"], "\n"),
    ],
)
def test_misspelled_command_gets_a_suggestion(words, answer) -> None:
    result = CliRunner().invoke(main, words)
    assert result.exit_code == exit_codes.USAGE
    assert f"No such command {words[-1]!r}.{answer}" in result.stderr


@pytest.mark.parametrize(
    ("variables", "is_styled", "is_colored"),
    [
        ({}, False, False),
        ({"FORCE_COLOR": "1"}, True, True),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, True, False),
        ({"NO_COLOR": "1"}, False, False),
    ],
)
def test_colors_are_those_that_the_environment_asks_for(variables, is_styled, is_colored) -> None:
    env = {"NO_COLOR": None, "FORCE_COLOR": None, "TERM": "xterm-256color", **variables}
    result = CliRunner().invoke(main, ["explain", "SG204"], env=env, color=True)
    assert ("\x1b[" in result.stdout) is (is_styled and is_colored)
    result = CliRunner().invoke(main, ["devices"], env=env, color=True)
    assert ("\x1b[" in result.stdout) is is_styled


# `stratagem plan`: output, files and exit codes.

_LOOP = Path(__file__).parents[1] / "planning" / "programs" / "loop.py"
_LARGE = _LOOP.with_name("large.py")
_DIGITS = Path(__file__).parents[3] / "examples" / "01_train_digits.py"


def _stratagem(*arguments: object) -> Result:
    return CliRunner().invoke(main, [*map(str, arguments)])


@pytest.mark.slow
def test_tables() -> None:
    result = _stratagem("plan", _LOOP, "--target", "4xH100")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(
        "loop.py on 4xH100: 32 parameters, global batch 24, 6 per device"
    )
    for title in ("Memory per device", "Communication per step", "Predicted step time"):
        assert title in result.stdout


@pytest.mark.slow
def test_links_are_given() -> None:
    links = ("--network-bytes-per-s", "1e6", "--network-latency-s", "0.05")
    result = _stratagem("plan", _LOOP, "--target", "16xH100", "--json", *links)
    assert result.exit_code == 0, result.output
    assumed = json.loads(result.stdout)["assumptions"]
    assert (assumed["network_bytes_per_s"], assumed["network_latency_s"]) == (1e6, 0.05)
    assert assumed["link_bytes_per_s"] is None
    assert (
        _stratagem("plan", _LOOP, "--target", "16xH100", "--network-latency-s", "0").exit_code == 2
    )


def test_json_is_what_the_file_has(tmp_path) -> None:
    json_file = tmp_path / "plan.json"
    result = _stratagem("plan", _LOOP, "--target", "4xH100", "--json", "--output", json_file)
    assert result.exit_code == 0, result.output
    written = json.loads(json_file.read_text())
    assert json.loads(result.stdout) == written
    assert (written["target"], written["memory"]["parameters_bytes"]) == ("4xH100", 128)
    assert "replicas 4" in result.stderr  # the script's own


def test_another_global_batch() -> None:
    result = _stratagem("plan", "--target", "2xH100", "--global-batch", 64, _LOOP)
    assert result.exit_code == 0, result.output
    assert "global batch 64, 32 per device" in result.stdout
    assert "The batch of 64 replaces the script's." in result.stdout


def test_state_that_the_script_does_not_share_out(tmp_path) -> None:
    """Over two devices, and in two copies over four."""
    shared = ("--shard-state", "all", "--output", tmp_path / "plan.json")
    result = _stratagem("plan", "--target", "2xH100", *shared, _LARGE, "--workers")
    assert result.exit_code == 0, result.output
    assert "large.py on 2xH100, shard_state=all: 16.4 k parameters" in result.stdout
    assert "evaluated 0.0" in result.stderr  # nothing was computed
    first = json.loads((tmp_path / "plan.json").read_text())
    result = _stratagem("plan", "--target", "4xH100", "--shard-size", 2, *shared, _LARGE)
    assert result.exit_code == 0, result.output
    for written in (first, json.loads((tmp_path / "plan.json").read_text())):
        assert written["shard_state"] == "all"
        assert written["memory"]["parameters_bytes"] == 4 * 128 * 128 // 2


def test_search(tmp_path) -> None:
    json_file = tmp_path / "a" / "search.json"
    result = _stratagem("plan", "--target", "2xH100", "--search", 2, "--output", json_file, _LARGE)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("large.py on 2xH100, global batch 16: the best 2 of ")
    assert "1  strategy = sg.MirroredStrategy()" in result.stdout
    written = json.loads(json_file.read_text())
    assert next(one["code"] for one in written["choices"]) == "strategy = sg.MirroredStrategy()"
    own_loop = _stratagem("plan", "--target", "2xH100", "--search", 2, _LOOP)
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
        ([_LOOP], "Missing option '--target'"),
    ],
)
def test_mistakes_are_named(arguments, message) -> None:
    result = _stratagem("plan", *arguments)
    assert (result.exit_code, result.stdout) == (1 if "--target" in arguments else 2, "")
    assert message in result.stderr


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


# `stratagem migrate`: diff, writing, exit codes and JSON.

PAGES = Path(__file__).parents[3] / "docs" / "reference" / "errors"
_TF = "import tensorflow as tf\ntf.Variable(1)\n"
_NEW = f"{SG}sg.Variable(1)\n"


def test_diff_by_default_and_files_with_write(tmp_path) -> None:
    (tmp_path / "b").mkdir()
    for path in (tmp_path / "a.py", tmp_path / "b" / "c.py"):
        path.write_text(_TF)
    result = _stratagem("migrate", tmp_path / "a.py")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()[-3:]
    assert lines == ["-tf.Variable(1)", f"+{SG.rstrip()}", "+sg.Variable(1)"]
    assert result.stderr == "1 file: 1 to change, 2 lines, 0 places left to do.\n"
    assert (tmp_path / "a.py").read_text() == _TF
    result = _stratagem("migrate", "--write", tmp_path)
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == "2 files: 2 changed, 4 lines, 0 places left to do.\n"
    assert (tmp_path / "b" / "c.py").read_text() == _NEW
    assert "0 changed, 0 lines" in _stratagem("migrate", "--write", tmp_path).stderr


def test_file_that_cannot_be_written_does_not_stop_the_others(tmp_path, monkeypatch) -> None:
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text(_TF)
    replace = Path.replace

    def refuse(self: Path, target: Path) -> Path:
        if target.name == "a.py":
            raise PermissionError(13, "Permission denied", str(target))
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", refuse)
    result = _stratagem("migrate", "--write", tmp_path)
    assert result.exit_code == 1
    assert "Permission denied" in result.stderr
    assert (tmp_path / "a.py").read_text() == _TF
    assert (tmp_path / "b.py").read_text() == _NEW
    assert "2 files: 1 changed, 2 lines" in result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.py", "b.py"]


@pytest.mark.parametrize(
    ("text", "code"),
    [(_TF, 1), (_NEW, 0), ("# STRATAGEM: tf.a: do it\nimport tensorflow as tf\ntf.a()\n", 1)],
)
def test_check(tmp_path, text, code) -> None:
    (tmp_path / "a.py").write_text(text)
    assert _stratagem("migrate", "--check", tmp_path / "a.py").exit_code == code
    assert (tmp_path / "a.py").read_text() == text


def test_json_and_files_that_cannot_be_read(tmp_path) -> None:
    (tmp_path / "a.py").write_text(_TF)
    (tmp_path / "b.py").write_text("x = 1\n")
    (tmp_path / "c.py").write_text("def f(:\n")
    result = _stratagem("migrate", "--write", "--json", tmp_path)
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert (found["files"], found["changed_files"], found["errors"]) == (3, 1, 1)
    assert [one["path"].rpartition("/")[2] for one in found["reports"]] == ["a.py", "c.py"]
    assert "Line 1 does not parse" in found["reports"][1]["error"]
    assert [(tmp_path / name).read_text() for name in ("a.py", "c.py")] == [_NEW, "def f(:\n"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "Missing argument 'PATH...'"),
        (("missing.py",), "'missing.py' does not exist"),
        ((PAGES.parents[2] / "pyproject.toml",), "pyproject.toml is not a program or a notebook"),
    ],
)
def test_wrong_use(arguments, words) -> None:
    result = _stratagem("migrate", *arguments)
    assert result.exit_code == 2
    assert words in result.stderr


def test_without_libcst(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "libcst", None)
    (tmp_path / "a.py").write_text(_TF)
    result = _stratagem("migrate", tmp_path)
    assert result.exit_code == 1
    assert "stratagem migrate needs libcst, which cannot be imported" in result.stderr
    assert "Fix: pip install 'stratagem[migrate]'" in result.stderr


# `stratagem explain`: a page, a row of the table, the list of codes, and unknown codes.


@pytest.mark.parametrize("code", [" sg204 ", "204"])
def test_page_is_printed_with_paths_of_files_in_place_of_links(code) -> None:
    result = _stratagem("explain", code)
    assert (result.exit_code, result.stderr) == (0, "")
    page = (PAGES / "SG204.md").read_text()
    assert result.stdout.splitlines()[0] == page.splitlines()[0]
    assert page.split("## Causes")[0] in result.stdout
    link = "\n  variables that replicas write (docs/libraries/on_read_variables.md).\n"
    assert link in result.stdout


def test_code_without_a_page_is_printed_from_its_row() -> None:
    assert not (PAGES / "SG412.md").exists()
    title, space, fix = _stratagem("explain", "SG412").stdout.splitlines()
    assert title == "# SG412: An optimizer outside of a step received different gradients"
    assert space == ""
    assert fix.startswith("Call `optimizer.apply` in the replica function")
    row = _stratagem("explain", "SG401").stdout
    assert row.endswith(" See what causes another compilation (docs/concepts/step.md).\n")


def test_every_code_is_printed_with_paths_of_files_in_place_of_links() -> None:
    for code in explain.load_pages():
        result = _stratagem("explain", code)
        assert result.exit_code == 0, code
        assert "](" not in result.stdout, code
        for path in re.findall(r"\((docs/[^)]*)\)", result.stdout):
            assert (PAGES.parents[2] / path).is_file(), (code, path)


def test_without_a_code_all_are_listed_by_group() -> None:
    result = _stratagem("explain")
    assert result.exit_code == 0
    listed = re.findall(r"^\* (SG\d{3}): (.+)$", result.stdout, re.MULTILINE)
    pages = explain.load_pages()
    assert [code for code, _ in listed] == sorted(pages)
    assert {path.stem for path in PAGES.glob("SG*.md")} < set(pages)
    for code, title in listed:
        assert pages[code].startswith(f"# {code}: {title}\n")
    groups = re.findall(r"^## SG(\d)xx: ", result.stdout, re.MULTILINE)
    assert groups == sorted({code[2] for code, _ in listed})


def test_page_and_list_are_json() -> None:
    page = json.loads(_stratagem("explain", "--json", "204").stdout)
    assert page["code"] == "SG204"
    assert page["text"] == _stratagem("explain", "204").stdout.rstrip("\n") + "\n"
    listed = {
        one["code"]: one["title"] for one in json.loads(_stratagem("explain", "--json").stdout)
    }
    assert listed.keys() == explain.load_pages().keys()
    assert listed["SG204"] == page["title"]
    assert page["text"].startswith(f"# SG204: {page['title']}\n")


@pytest.mark.parametrize(
    ("code", "answer"),
    [("SG2O4", "Did you mean SG204"), ("batch", "`stratagem explain` lists all codes.")],
)
def test_unknown_code_names_close_ones_with_exit_code_2(code, answer) -> None:
    result = _stratagem("explain", code)
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"There is no error code {code!r}. {answer}" in result.stderr


def test_missing_pages_are_an_error(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(explain, "_FOLDERS", (tmp_path / "none",))
    result = _stratagem("explain", "SG204")
    assert result.exit_code == 1
    assert "The pages of the error codes are not installed." in result.stderr


def test_installed_pages_come_before_those_of_a_checkout(monkeypatch, tmp_path) -> None:
    (tmp_path / "index.md").write_text("| [SG999](SG999.md) | Nothing | No fix. |\n")
    (tmp_path / "SG999.md").write_text("# SG999: Nothing\n\nNo cause.\n")
    monkeypatch.setattr(explain, "_FOLDERS", (tmp_path, PAGES))
    assert list(explain.load_pages()) == ["SG999"]
    assert _stratagem("explain", "999").stdout == "# SG999: Nothing\n\nNo cause.\n"


def test_nothing_heavy_is_loaded(tmp_path) -> None:
    statement = "from stratagem.cli import main; main(['explain', 'SG204'], standalone_mode=False)"
    assert first_that_is_heavy([statement], tmp_path) == ""


# `stratagem goodput`: output, plots and exit codes.


def test_json_is_the_account(tmp_path) -> None:
    write_of_goodput(tmp_path, gang_restart())
    result = _stratagem("goodput", tmp_path, "--json")
    values = json.loads(result.stdout)
    assert (result.exit_code, result.stderr) == (0, "")
    assert values["goodput"] == pytest.approx(40 / 78)
    assert values["failures"][0]["what"] == "worker 1 lost"
    assert values["goodput_after_startup"] == pytest.approx(40 / 68)
    assert values["startup_s"] == pytest.approx(10)
    assert values["time_s"]["repeated"] == pytest.approx(10)
    assert sum(values["time_s"].values()) == pytest.approx(values["whole_s"])


def test_plot_is_written_along_with_the_tables(tmp_path) -> None:
    write_of_goodput(tmp_path, gang_restart())
    path = tmp_path / "new" / "run.png"
    result = _stratagem("goodput", tmp_path, "--plot", path)
    assert result.exit_code == 0
    assert result.stdout.startswith("Goodput after start-up: 0.588 (40.0 s useful of 1 min 08 s)")
    assert path.read_bytes().startswith(b"\x89PNG")
