"""Notebooks: cells as one program, magics, shell lines, files written by cells, and the JSON."""

from __future__ import annotations

import json

import pytest

from stratagem.cli.migrate.files import UnreadableSourceError, rewrite, rewrite_notebook
from tests.unit.cli.migrate.programs import SG


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
    text, _ = rewrite_notebook(notebook(*sources), rewrite)
    again, _ = rewrite_notebook(text, rewrite)
    assert again == text
    return cells_of(text)


def test_import_of_one_cell_is_known_in_the_next() -> None:
    assert after("import tensorflow as tf", "tf.keras.Model\n\n", "x = 1") == [
        f"{SG}import keras",
        "keras.Model\n\n",
        "x = 1",
    ]


def test_statements_of_several_cells() -> None:
    cells = after("import tensorflow as tf", "d = tf.data.Dataset.range(4)", "d = d.batch(2)")
    assert cells[1:] == ["d = sg.input.Dataset(np.arange(4), batch_size=2)", ""]


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


def test_line_that_begins_with_percent_within_an_expression() -> None:
    cell = "print('%d'\n      %(tf.Variable(1).numpy()))\n%time f()"
    expected = "print('%d'\n      %(np.asarray(sg.Variable(1))))\n%time f()"
    assert after("import tensorflow as tf", cell)[1] == expected


def test_cell_magic_with_python() -> None:
    assert after("import tensorflow as tf", "%%time\ntf.keras.Model")[1] == "%%time\nkeras.Model"


def test_file_written_by_a_cell_is_a_program_of_its_own() -> None:
    cell = "%%writefile a.py\nimport tensorflow as tf\ntf.keras.Model\n"
    assert after(cell) == [f"%%writefile a.py\n{SG}import keras\nkeras.Model\n"]


def test_notebook_without_tensorflow_stays_byte_by_byte() -> None:
    text = notebook("x=1\n!ls", indent=3)
    assert rewrite_notebook(text, rewrite)[0] is text


@pytest.mark.parametrize("indent", [1, 2, 4, None])
@pytest.mark.parametrize("ensure_ascii", [False, True])
@pytest.mark.parametrize("end", ["\n", ""])
def test_manner_of_the_json_stays(indent, ensure_ascii, end) -> None:
    dump = {"indent": indent, "ensure_ascii": ensure_ascii}
    before = notebook("import tensorflow as tf\ntf.Variable", **dump) + end
    expected = notebook(f"{SG}sg.Variable", **dump) + end
    assert rewrite_notebook(before, rewrite)[0] == expected


def test_source_that_is_one_string() -> None:
    cell = {"cell_type": "code", "source": "import tensorflow as tf\ntf.Variable"}
    text, _ = rewrite_notebook(json.dumps({"cells": [cell]}), rewrite)
    assert json.loads(text)["cells"][0]["source"] == f"{SG}sg.Variable"


@pytest.mark.parametrize("text", ["{", "[]", '{"worksheets": []}', '{"cells": 3}'])
def test_text_that_is_no_notebook(text) -> None:
    with pytest.raises(UnreadableSourceError, match="This is not a notebook: "):
        rewrite_notebook(text, rewrite)
