"""The commands that pages show run, and their tables are those of the templates."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from stratagem.cli import main
from stratagem.cli.manifests.rendering import (
    Template,
    kubernetes_template,
    ray_template,
    slurm_template,
)
from tests.command_runner import CliRunner
from tests.unit.cli.manifests.schemas import mistakes

_FOLDER = Path(__file__).parents[2] / "docs" / "clusters"
_BLOCK = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_ROW = re.compile(r"^\| `(\w+)` \| (?:`(--[-a-z]+)`)? ?\| `([^`]*)` \| [^|]+ \|$", re.MULTILINE)
_PAGES = ["kubernetes.md", "slurm.md"]
_RAY = re.compile(r"Its variables are (.*?)\. Servers", re.DOTALL)


def _commands(page: str) -> list[str]:
    """The commands of ours in a page's blocks, each in one line."""
    lines = "".join(_BLOCK.findall(page)).replace("\\\n", " ").splitlines()
    return [line for line in lines if line.startswith("stratagem ")]


@pytest.mark.parametrize("name", _PAGES)
def test_commands_of_a_page_run_one_after_the_other(name, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    commands = _commands((_FOLDER / name).read_text(encoding="utf-8"))
    assert commands
    for command in commands:
        words = shlex.split(command)[1:]
        ends = [words.index(sign) for sign in (">", "|") if sign in words]
        result = CliRunner().invoke(main, words[: min(ends, default=len(words))])
        assert result.exit_code == 0, result.output
        if ">" in words:
            Path(words[words.index(">") + 1]).write_text(result.stdout)


@pytest.mark.parametrize(
    ("name", "template", "command"),
    [
        ("kubernetes.md", kubernetes_template(), "kubernetes"),
        ("slurm.md", slurm_template(), "slurm"),
    ],
)
def test_table_is_that_of_the_template(name, template, command) -> None:
    rows = _ROW.findall((_FOLDER / name).read_text(encoding="utf-8"))
    written = dict(re.findall(r"\{% set (\w+) = (.*?) -?%\}", template))
    assert [variable for variable, _, _ in rows] == list(Template(template).variables)
    for variable, _, default in rows:
        assert default in (written[variable], written[variable].strip('"'))
    render = main.commands[command].commands["render"]
    flags = {parameter.name: parameter.opts[0] for parameter in render.params}
    documented = {variable: flag for variable, flag, _ in rows if flag}
    assert documented == {
        variable: flag for variable, flag in flags.items() if variable in documented
    }
    assert flags.keys() - documented.keys() <= {
        *("template", "assignments", "nodes", "ray"),
        *("quiet", "verbose"),  # of every command
    }


def test_links_lead_to_files() -> None:
    for name in _PAGES:
        page = (_FOLDER / name).read_text(encoding="utf-8")
        for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", page):
            assert (_FOLDER / target).exists(), f"{name} links to {target}"


def test_ray_form_of_the_page_is_valid_and_all_its_variables_are_reported() -> None:
    page = (_FOLDER / "remote.md").read_text(encoding="utf-8")
    (render,) = [command for command in _commands(page) if " render " in command]
    words = shlex.split(render)
    result = CliRunner().invoke(main, words[1 : words.index(">")])
    assert mistakes(result.stdout) == []
    (documented,) = _RAY.findall(page)
    assert re.findall(r"`(\w+)`", documented) == list(Template(ray_template()).variables)
