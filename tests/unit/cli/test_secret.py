"""`stratagem secret`: secrets on stdout and in files."""

from __future__ import annotations

import stat

from click.testing import CliRunner

from stratagem.cli import main
from stratagem.group.authentication.secret import Secret, find_secret


def test_secret_is_printed() -> None:
    results = [CliRunner().invoke(main, ["secret"]) for _ in range(2)]
    assert [result.exit_code for result in results] == [0, 0]
    assert len({Secret(result.output.strip()).key("x") for result in results}) == 2


def test_file_is_only_for_its_owner_and_is_accepted(monkeypatch, tmp_path) -> None:
    path = tmp_path / "run.secret"
    result = CliRunner().invoke(main, ["secret", "--file", str(path)])
    assert (result.exit_code, result.output) == (0, "")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    monkeypatch.delenv("STRATAGEM_SECRET", raising=False)
    monkeypatch.setenv("STRATAGEM_SECRET_FILE", str(path))
    found = find_secret()
    assert found is not None
    assert path.read_text().strip() in found.variables().values()


def test_file_that_exists_is_not_replaced(tmp_path) -> None:
    path = tmp_path / "run.secret"
    path.write_text("mine")
    result = CliRunner().invoke(main, ["secret", "--file", str(path)])
    assert result.exit_code == 1
    assert f"{path} cannot be created: File exists." in result.stderr
    assert path.read_text() == "mine"
