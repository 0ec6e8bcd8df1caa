"""Guarantees about whole programs: what comes out parses, and a second run changes nothing."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stratagem.cli.migrate import files
from stratagem.cli.migrate.files import FileReport, UnreadableSourceError, rewrite, rewrite_notebook
from tests.unit.cli.migrate.programs import SG

_REPOSITORY = Path(__file__).parents[4]
_KERAS = Path(importlib.util.find_spec("keras").submodule_search_locations[0])
_IMPORT = re.compile(r"^\s*(import|from) tensorflow", re.MULTILINE)
_PAGE = _REPOSITORY / "docs" / "migrate" / "tool.md"


def _split(files: Iterable[Path]) -> tuple[list[Path], list[Path]]:
    """Files that import TensorFlow, and the others."""
    groups: tuple[list[Path], list[Path]] = ([], [])
    for path in sorted(files):
        groups[_IMPORT.search(path.read_text(encoding="utf-8")) is None].append(path)
    return groups


@pytest.mark.slow
def test_files_of_keras_that_use_tensorflow() -> None:
    with_tensorflow, _ = _split(_KERAS.rglob("*.py"))
    # Larger ones take seconds each.
    files = [path for path in with_tensorflow if path.stat().st_size < 6_000][::6]
    assert len(files) > 5
    for path in files:
        after = rewrite(path.read_text(encoding="utf-8"))
        ast.parse(after)
        assert rewrite(after) == after, path


@pytest.mark.slow
def test_files_without_tensorflow_stay() -> None:
    folders = (_REPOSITORY / "examples", _KERAS / "src" / "layers")
    _, others = _split(path for folder in folders for path in folder.rglob("*.py"))
    assert len(others) > 200
    for path in others:
        text = path.read_text(encoding="utf-8")
        assert rewrite(text) == text, path


STATEMENTS = [
    "import tensorflow as tf",
    "from tensorflow import keras",
    "from tensorflow.keras import layers, foo",
    "import tensorflow.keras.backend as K",
    "import keras",
    "x = tf.reduce_mean(tf.cast(y, tf.float32), 1, name='m')",
    "d = tf.data.Dataset.from_tensor_slices(x).shuffle(3)",
    "d = d.batch(2).map(f)",
    "d = d.batch(2)",
    "tf.config.experimental.set_memory_growth(x, True)",
    "tf.foo(K.tile(x)); y = layers.Dense(1)",
    "x = 1",
    "tf = 3",
    "g = tape.gradient(loss, v)",
    "optimizer.apply_gradients(zip(tape.gradient(loss, v), v))",
    "loss = f(x)",
    "loss += f(x)",
    "return x",
    "tf.print(x, 'a', end='')",
]
HEADERS = [
    "with tf.GradientTape() as tape:",
    "with tf.GradientTape() as tape, tf.GradientTape() as t:",
    "@tf.function\ndef f(x):",
    "for x in tf.range(3):",
    "if x:",
    "class A(tf.keras.Model):",
    "try:",
]


@st.composite
def programs(draw, depth: int = 0) -> str:
    lines = [draw(st.sampled_from(STATEMENTS)) for _ in range(draw(st.integers(1, 5)))]
    if depth < 3:
        for _ in range(draw(st.integers(0, 2))):
            header = draw(st.sampled_from(HEADERS))
            inner = draw(programs(depth=depth + 1))
            block = f"{header}\n" + "".join(f"  {line}\n" for line in inner.splitlines())
            if header == "try:":
                block += "finally:\n  pass\n"
            lines.insert(draw(st.integers(0, len(lines))), block.rstrip())
    return "\n".join(lines) + "\n"


def _parses(program: str) -> bool:
    try:
        ast.parse(program)
    except (SyntaxError, ValueError):
        return False
    return True


@pytest.mark.slow
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(programs().filter(_parses))
def test_any_program_parses_and_a_second_run_changes_nothing(program) -> None:
    after = rewrite(program)
    ast.parse(after)
    assert rewrite(after) == after


@given(st.text(max_size=60))
@settings(max_examples=100, deadline=None)
def test_any_text_is_a_program_or_an_error(text) -> None:
    program = f"{text}\n# tensorflow\n"
    if _parses(program):
        assert rewrite(program) == program
    else:
        with pytest.raises(UnreadableSourceError, match="does not parse"):
            rewrite(program)


def test_example_of_the_page_is_what_the_tool_prints() -> None:
    page = _PAGE.read_text(encoding="utf-8")
    shown = re.search(r"^```diff\n(--- a/train\.py.*?)^```$", page, re.MULTILINE | re.DOTALL)
    lines = shown[1].splitlines()[3:]
    before = "".join(f"{line[1:]}\n" for line in lines if not line.startswith("+"))
    report = FileReport(Path("train.py"), before, rewrite(before))
    assert report.diff() == shown[1]


# Files: found in folders, read, reported and written.

TF = "import tensorflow as tf\ntf.Variable(1)\n"


def test_folders_are_searched_without_hidden_and_installed_ones(tmp_path) -> None:
    wanted = ["a.py", "b/c.py", "b/d.ipynb"]
    others = [".git/e.py", ".f.py", "venv/g.py", "h.txt", "b/site-packages/i.py", "mine/j.py"]
    for name in (*wanted, *others):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    (tmp_path / "mine" / "pyvenv.cfg").write_text("")
    found = files.find_files([tmp_path, tmp_path / "a.py"])
    assert found == [tmp_path / name for name in wanted]


def test_report(tmp_path) -> None:
    path = tmp_path / "a.py"
    path.write_text(f"{TF}tf.foo()\n")
    report = files.migrate_file(path)
    assert report.is_changed
    assert report.num_changed_lines == 3  # the import, the variable, and the comment
    assert report.to_dict() == {
        "path": str(path),
        "changed": True,
        "changed_lines": 3,
        "left_to_do": [
            {"line": 4, "text": "tf.foo: there is no counterpart yet, see docs/migrate/tool.md"}
        ],
        "error": None,
    }
    assert files.summary([report]) == {
        "files": 1,
        "changed_files": 1,
        "changed_lines": 3,
        "left_to_do": 1,
        "errors": 0,
    }


def test_diff_without_a_line_break_at_the_end(tmp_path) -> None:
    path = tmp_path / "a.py"
    path.write_text("import tensorflow as tf\ntf.Variable")
    lines = files.migrate_file(path).diff().splitlines()
    assert lines[-2:] == [f"+{SG.rstrip()}", "+sg.Variable"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"def f(:\n", "Line 1 does not parse"),
        (b"import tensorflow\nprint 'a'\n", "Line 2 does not parse"),
        (b"\xff\xfe\x00", "not text in UTF-8"),
        (b"x = 1\x00\n", "does not parse"),
    ],
)
def test_unreadable_file_has_an_error(tmp_path, content, words) -> None:
    path = tmp_path / "a.py"
    path.write_bytes(content)
    report = files.migrate_file(path)
    assert words in (report.error or "")
    assert not report.is_changed


def test_marks_of_a_notebook(tmp_path) -> None:
    path = tmp_path / "a.ipynb"
    cell = {"cell_type": "code", "source": "import tensorflow as tf\ntf.foo"}
    path.write_text(json.dumps({"cells": [cell]}))
    report = files.migrate_file(path)
    assert [line for line, _ in report.marks] == [0]
    assert report.marks[0][1].startswith("tf.foo: ")


def test_written_file_keeps_its_permissions_and_line_ends(tmp_path) -> None:
    path = tmp_path / "a.py"
    path.write_bytes(TF.replace("\n", "\r\n").encode())
    path.chmod(0o750)
    files.write(files.migrate_file(path))
    assert path.read_bytes() == f"{SG}sg.Variable(1)\n".replace("\n", "\r\n").encode()
    assert path.stat().st_mode & 0o777 == 0o750
    assert [one.name for one in tmp_path.iterdir()] == ["a.py"]


def test_link_stays_a_link(tmp_path) -> None:
    path, link = tmp_path / "a.py", tmp_path / "b.py"
    path.write_text(TF)
    link.symlink_to(path)
    files.write(files.migrate_file(link))
    assert link.is_symlink()
    assert "sg.Variable" in path.read_text()


# Notebooks: cells as one program, magics, shell lines, files written by cells, and the JSON.


def notebook(*sources: str, **dump: object) -> str:
    cells = [
        {"cell_type": "code", "metadata": {}, "source": source.splitlines(keepends=True)}
        for source in sources
    ]
    cells.insert(0, {"cell_type": "markdown", "metadata": {}, "source": ["tf.keras ñ\n"]})
    return json.dumps({"cells": cells, "nbformat": 4}, **dump)


def cells_of(text: str) -> list[str]:
    return ["".join(cell["source"]) for cell in json.loads(text)["cells"][1:]]


def after(*sources: str) -> list[str]:
    text, _ = rewrite_notebook(notebook(*sources))
    again, _ = rewrite_notebook(text)
    assert again == text
    return cells_of(text)


MAGIC = [
    "%load_ext tensorboard\nprint(1)",
    "!pip install tf-nightly\n",
    "if a:\n  !ls {folder}\n",
    "files = !ls\n",
    "files = %sx ls\n",
    "?print",
    "x = 1\nprint?\n",
    "%%bash\nimport tensorflow as tf\n",
    "%%writefile notes.txt\nimport tensorflow as tf\n",
    "print 'Python 2'",
    "",
]


@pytest.mark.parametrize("cell", MAGIC)
def test_magic_stays(cell) -> None:
    assert after("import tensorflow as tf\ntf.Variable(1)", cell)[1] == cell


_IMPORT_TF = "import tensorflow as tf"


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        (
            (_IMPORT_TF, "tf.keras.Model\n\n", "x = 1"),
            [f"{SG}import keras", "keras.Model\n\n", "x = 1"],
        ),
        (
            (_IMPORT_TF, "d = tf.data.Dataset.range(4)", "d = d.batch(2)"),
            [..., "d = sg.input.Dataset(np.arange(4), batch_size=2)", ""],
        ),
        # A line that begins with a percent sign, within an expression and alone.
        (
            (_IMPORT_TF, "print('%d'\n      %(tf.Variable(1).numpy()))\n%time f()"),
            [..., "print('%d'\n      %(np.asarray(sg.Variable(1))))\n%time f()"],
        ),
        ((_IMPORT_TF, "%%time\ntf.keras.Model"), [..., "%%time\nkeras.Model"]),
        # A file that a cell writes is a program of its own.
        (
            (f"%%writefile a.py\n{_IMPORT_TF}\ntf.keras.Model\n",),
            [f"%%writefile a.py\n{SG}import keras\nkeras.Model\n"],
        ),
    ],
)
def test_cells_are_one_program(cells, expected) -> None:
    for found, wanted in zip(after(*cells), expected, strict=True):
        assert wanted is ... or found == wanted


@pytest.mark.parametrize(
    ("indent", "ensure_ascii", "end"), [(1, False, "\n"), (2, True, ""), (None, True, "\n")]
)
def test_manner_of_the_json_stays(indent, ensure_ascii, end) -> None:
    dump = {"indent": indent, "ensure_ascii": ensure_ascii}
    before = notebook("import tensorflow as tf\ntf.Variable", **dump) + end
    expected = notebook(f"{SG}sg.Variable", **dump) + end
    assert rewrite_notebook(before)[0] == expected


def test_source_that_is_one_string() -> None:
    cell = {"cell_type": "code", "source": "import tensorflow as tf\ntf.Variable"}
    text, _ = rewrite_notebook(json.dumps({"cells": [cell]}))
    assert json.loads(text)["cells"][0]["source"] == f"{SG}sg.Variable"


@pytest.mark.parametrize("text", ["{", "[]", '{"worksheets": []}', '{"cells": 3}'])
def test_text_that_is_no_notebook(text) -> None:
    with pytest.raises(UnreadableSourceError, match="This is not a notebook: "):
        rewrite_notebook(text)


# Printed reports.

ONE = FileReport(Path("a.py"), "x\n", "y\n", marks=((3, "tf.foo: do it"), (0, "tf.bar: too")))
BROKEN = FileReport(Path("b.py"), error="Line 1 does not parse.")


def test_diff_is_colored_on_a_terminal(capsys, monkeypatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    files.show_diff(ONE)
    shown = capsys.readouterr().out
    assert "\x1b[" in shown
    assert "+y" in shown


def test_summary(capsys) -> None:
    files.show_summary([ONE, BROKEN], written=False)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == (
        "a.py:3: tf.foo: do it\n"
        "a.py: tf.bar: too\n"
        "b.py stays as it is. Line 1 does not parse.\n"
        "2 files: 1 to change, 1 line, 2 places left to do, 1 not readable.\n"
    )
