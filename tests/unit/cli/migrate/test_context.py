"""Local names of modules, and comments above statements."""

from __future__ import annotations

import libcst as cst
import pytest
from libcst.metadata import MetadataWrapper

from stratagem.cli.migrate.context import FileContext, dotted, module_names, with_marks
from stratagem.cli.migrate.names import code_of
from stratagem.cli.migrate.rules import Advice


def test_code_has_the_names_of_the_file() -> None:
    context = FileContext({"np": "n"}, taken={"sg", "keras"})
    code = "sg.run(np.asarray(keras.ops.sum(x.sg.y)), 'np.zeros', other.np)"
    expected = "stratagem.run(n.asarray(keras_module.ops.sum(x.sg.y)), 'np.zeros', other.np)"
    assert context.code(code) == expected
    assert context.needed == {"sg", "np", "keras"}
    assert context.import_line("keras") == "import keras as keras_module"
    assert context.import_line("np") == "import numpy as n"


def test_names_of_a_file() -> None:
    code = "import numpy as n\nfrom tensorflow import keras as k\nimport jax\ndef os(sg): pass\n"
    names, taken = module_names(MetadataWrapper(cst.parse_module(code)))
    assert names == {"np": "n", "keras": "k", "jax": "jax"}
    assert {"os", "sg"} <= taken


@pytest.mark.parametrize(("code", "name"), [("a.b.c", "a.b.c"), ("a", "a"), ("a().b", None)])
def test_dotted(code, name) -> None:
    assert dotted(cst.parse_expression(code)) == name


def test_one_comment_for_a_cause() -> None:
    node = cst.parse_statement("# STRATAGEM: tf.a: one, see p\nx\n")
    advice = [Advice("tf.a: two", "p"), Advice("tf.b: one", "p"), Advice("tf.c: three", "p")]
    marked = with_marks(with_marks(node, advice), advice)
    assert code_of(marked) == "# STRATAGEM: tf.a: one, see p\n# STRATAGEM: tf.c: three, see p\nx\n"
