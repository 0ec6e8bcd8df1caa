"""Optional libraries are absent for Keras, and there for a program that imports them itself."""

from __future__ import annotations

from pathlib import Path

from tests.fresh_process import run_fresh

_KERAS = """
try:
    import sklearn
except ImportError as error:
    sklearn = error.name, str(error)
"""


def test_library_is_absent_while_keras_is_imported_only(tmp_path: Path) -> None:
    (tmp_path / "keras").mkdir()
    (tmp_path / "keras/__init__.py").write_text(_KERAS)
    (tmp_path / "sklearn.py").touch()
    program = "import keras, sklearn; print(*keras.sklearn, sep='\\n'); print(sklearn.__file__)"
    lines = run_fresh(program, folder=tmp_path, PYTHONPATH=str(Path(__file__).parent))
    left_out = "sklearn is left out while Keras is imported"
    assert lines == ["sklearn", left_out, str(tmp_path / "sklearn.py")]
