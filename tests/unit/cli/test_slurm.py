"""`stratagem slurm`: output and exit codes."""

from __future__ import annotations

import pytest
from click.testing import Result

from stratagem.cli import main
from tests.command_runner import CliRunner


def _call(*arguments: str, given: str | None = None) -> Result:
    return CliRunner().invoke(main, ["slurm", *arguments], input=given)


def test_flags_are_the_variables_of_the_template() -> None:
    result = _call(
        "render",
        *("--name", "digits", "--nodes", "2", "--tasks-per-node", "4", "--gpus-per-worker", "1"),
        *("--partition", "gpu", "--time", "12:00:00", "--script", "my train.py"),
        *("--args", "--epochs 5 --note 'a b'", "--set", "python=.venv/bin/python"),
    )
    assert (result.exit_code, result.stderr) == (0, "")
    for line in (
        "#SBATCH --job-name=digits",
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks=8",
        "#SBATCH --ntasks-per-node=4",
        "#SBATCH --gpus-per-node=4",
        "#SBATCH --partition=gpu",
        "#SBATCH --time=12:00:00",
        "    .venv/bin/python -u 'my train.py' --epochs 5 --note 'a b'",
    ):
        assert f"\n{line}\n" in result.stdout


def test_template_is_printed_edited_and_rendered(tmp_path) -> None:
    path = tmp_path / "mine.jinja"
    path.write_text(_call("template").stdout.replace("worker_replicas = 2", "worker_replicas = 3"))
    assert "#SBATCH --ntasks=3\n" in _call("render", str(path)).stdout
    assert "#SBATCH --ntasks=5\n" in _call("render", str(path), "--workers", "5").stdout
    assert _call("render", "-", given=_call("template").stdout).stdout == _call("render").stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "has_eval=1"], "has no variable 'has_eval'.\nExpected one of array"),
        (
            ["--nodes", "3", "--workers", "2"],
            "2 workers at 1 per node need 2 nodes, but 3 were requested",
        ),
        (["--time", "soon"], "time='soon' is not valid."),
        (["--set", "time=1", "--time", "2"], "time is set by --set and by its flag"),
    ],
)
def test_invalid_arguments_exit_with_code_2(arguments, message) -> None:
    result = _call("render", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
