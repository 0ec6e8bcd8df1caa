"""The page about goodput shows what the command prints, and names all causes and events."""

from __future__ import annotations

import re
from pathlib import Path

from stratagem.cli import main
from stratagem.observe.events import _KINDS, EndEvent, Event, StartEvent, StepEvent, read_run
from stratagem.observe.goodput import CAUSES
from tests.command_runner import CliRunner
from tests.fresh_process import run_fresh
from tests.unit.observe.runs import long_run, write

_FOLDER = Path(__file__).parents[2] / "docs" / "how_to"
_PAGE = (_FOLDER / "goodput.md").read_text(encoding="utf-8")
_ROW = re.compile(r"^\| `([\w ]+)` \| (.*) \|$", re.MULTILINE)


def _stripped(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


def test_example_is_what_the_command_prints(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    write(tmp_path / "runs" / "digits", long_run(2))
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, ["goodput", "runs/digits", "--plot", "goodput.png"])
    assert result.exit_code == 0
    (shown,) = re.findall(r"^```text\n(.*?)^```$", _PAGE, re.MULTILINE | re.DOTALL)
    assert _stripped(result.stdout) == _stripped(shown)
    assert (tmp_path / "goodput.png").exists()


def test_page_names_every_cause_and_every_kind_of_event() -> None:
    assert sorted(dict(_ROW.findall(_PAGE))) == sorted(CAUSES)
    kinds = _PAGE.partition("## Event files")[2]
    assert [name for name in map(_kind, _KINDS.values()) if f"`{name}`" not in kinds] == []


def _kind(subclass: type[Event]) -> str:
    """SaveStartedEvent is `save_started`."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", subclass.__name__.removesuffix("Event")).lower()


def test_loop_of_the_page_writes_a_run(tmp_path) -> None:
    (program,) = re.findall(r"^```python\n(.*?)^```$", _PAGE, re.MULTILINE | re.DOTALL)
    around = "train_step, batches = print, iter(range(100))\n"
    run_fresh(around + program, TF_CONFIG=None, STRATAGEM_RUN_DIR=str(tmp_path / "digits"))
    (written,) = read_run(tmp_path / "digits").processes
    kinds = [type(event) for event in written.events]
    assert (kinds[0], kinds[-1]) == (StartEvent, EndEvent)
    steps = [event for event in written.events if isinstance(event, StepEvent)]
    assert sum(event.num_steps for event in steps) == steps[-1].step == 100


def test_links_lead_to_files() -> None:
    targets = re.findall(r"\]\((?!https?:)([^)#]+)\)", _PAGE)
    assert targets
    assert [target for target in targets if not (_FOLDER / target).exists()] == []
