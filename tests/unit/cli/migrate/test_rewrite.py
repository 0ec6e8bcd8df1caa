"""Guarantees about whole programs: what comes out parses, and a second run changes nothing."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stratagem.cli.migrate.files import FileReport, UnreadableSourceError, rewrite

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
        after = rewrite(path.read_text(encoding="utf-8")).after
        ast.parse(after)
        assert rewrite(after).after == after, path


@pytest.mark.slow
@pytest.mark.parametrize("every", [5, 1])
def test_files_without_tensorflow_stay(every: int) -> None:
    folders = (_REPOSITORY / "examples", _KERAS / "src" / "layers")
    _, others = _split(path for folder in folders for path in folder.rglob("*.py"))
    assert len(others) > 200
    for path in others[::every]:
        assert not rewrite(path.read_text(encoding="utf-8")).is_changed, path


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
    after = rewrite(program).after
    ast.parse(after)
    assert rewrite(after).after == after


@given(st.text(max_size=60))
@settings(max_examples=100, deadline=None)
def test_any_text_is_a_program_or_an_error(text) -> None:
    program = f"{text}\n# tensorflow\n"
    if _parses(program):
        assert rewrite(program).after == program
    else:
        with pytest.raises(UnreadableSourceError, match="does not parse"):
            rewrite(program)


@pytest.mark.parametrize("source", ["def f(:\n", "print 'a'\n", "if x:\nimport tensorflow\n"])
def test_program_that_does_not_parse(source) -> None:
    with pytest.raises(UnreadableSourceError, match=r"Line \d does not parse"):
        rewrite(source)


def test_marks_are_counted() -> None:
    found = rewrite("import tensorflow as tf\ntf.foo()\nx = 1\ntf.bar()\n")
    assert found.num_marks == 2
    assert found.is_changed


def test_example_of_the_page_is_what_the_tool_prints() -> None:
    page = _PAGE.read_text(encoding="utf-8")
    shown = re.search(r"^```diff\n(--- a/train\.py.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert shown is not None
    lines = shown[1].splitlines()[3:]
    before = "".join(f"{line[1:]}\n" for line in lines if not line.startswith("+"))
    report = FileReport(Path("train.py"), before, rewrite(before).after)
    assert report.diff() == shown[1]
