"""Each folder of the package says what is in it, who calls it, and where to begin reading."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.architecture.source_tree import SOURCE

_FOLDERS = sorted(
    {path.parent for path in SOURCE.rglob("*.py") if len([*path.parent.glob("*.py")]) > 1}
    - {SOURCE / "stratagem"}
)


@pytest.mark.parametrize("folder", _FOLDERS, ids=lambda one: str(one.relative_to(SOURCE)))
def test_folder_has_a_readme_with_callers_and_a_start(folder: Path) -> None:
    text = (folder / "README.md").read_text(encoding="utf-8")
    assert re.search(r"^Called by", text, re.MULTILINE)
    assert "Begin with `" in text
    named = re.findall(r"`([\w/]+\.py)`", text)
    missing = [name for name in named if not any(SOURCE.rglob(name))]
    assert not missing, f"{folder}/README.md names {missing}"
