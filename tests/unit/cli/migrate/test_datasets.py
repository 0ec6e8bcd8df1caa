"""tf.data pipelines: chains, chains of several statements, and unknown operations."""

from __future__ import annotations

import pytest

from tests.unit.cli.migrate.programs import body, same

CHAINS = [
    ("from_tensor_slices((x, y)).batch(8)", "sg.input.Dataset((x, y), batch_size=8)"),
    (
        "from_tensor_slices(x).shuffle(9).batch(8, drop_remainder=True)",
        "sg.input.Dataset(x, batch_size=8, shuffle=True, drop_remainder=True)",
    ),
    (
        "from_tensor_slices(x).cache().shuffle(9, seed=1).repeat(2).batch(8).prefetch(2)",
        "sg.input.Dataset(x, batch_size=8, shuffle=True, seed=1).repeat(2)",
    ),
    (
        "from_tensor_slices(x).shard(n, i).batch(8).repeat()",
        "sg.input.Dataset(x, batch_size=8).shard(n, i).repeat()",
    ),
    ("range(9).batch(2)", "sg.input.Dataset(np.arange(9), batch_size=2)"),
    (
        "from_tensors((a, b)).repeat(9).batch(2)",
        "sg.input.Dataset((np.repeat([a], 9, axis=0), np.repeat([b], 9, axis=0)), batch_size=2)",
    ),
    (
        "from_tensors(a).repeat(9).batch(2)",
        "sg.input.Dataset(np.repeat([a], 9, axis=0), batch_size=2)",
    ),
    (
        "from_generator(g, output_types=tf.float32, args=(1,))",
        "sg.input.Dataset.from_generator(g, args=(1,))",
    ),
]


@pytest.mark.parametrize(("before", "after"), CHAINS)
def test_chain(before, after) -> None:
    assert body(f"d = tf.data.Dataset.{before}\n") == f"d = {after}\n"


def test_long_chain_has_lines() -> None:
    text = body(f"d = tf.data.Dataset.from_tensor_slices(({'a' * 40}, y)).shuffle(9).batch(size)\n")
    first = f"    ({'a' * 40}, y), batch_size=size, shuffle=True\n"
    assert text == f"d = sg.input.Dataset(\n{first})\n"
    text = body(f"d = tf.data.Dataset.from_tensor_slices(({'a' * 70}, y)).shuffle(9).batch(size)\n")
    assert text.count("\n") == 5


def test_chain_of_several_statements() -> None:
    same(
        """
        def f():
            d = tf.data.Dataset.from_tensor_slices(x)
            d = d.shuffle(10).repeat()
            n = 3
            d = d.batch(4)
            d = d.prefetch(tf.data.AUTOTUNE)
            return d
        """,
        """
        def f():
            d = sg.input.Dataset(x, batch_size=4, shuffle=True).repeat()
            n = 3
            return d
        """,
    )


@pytest.mark.parametrize("between", ["n = f()", "print(d)", "d = f()"])
def test_statement_between_that_matters_ends_the_chain(between) -> None:
    text = body(f"d = tf.data.Dataset.from_tensor_slices(x)\n{between}\nd = d.batch(n)\n")
    assert "no batch()" in text
    assert text.endswith(f"{between}\nd = d.batch(n)\n")


def test_options_stay_outside_of_the_chain() -> None:
    text = body("d = tf.data.Dataset.range(8).batch(2)\nd = d.with_options(o)\n")
    assert text == "d = sg.input.Dataset(np.arange(8), batch_size=2)\nd = d.with_options(o)\n"


UNKNOWN = [
    ("from_tensor_slices(x)", "no batch()"),
    ("from_tensor_slices(x).map(f).batch(2)", "map()"),
    ("from_tensor_slices(x).batch(2).map(f)", "map() of batches"),
    ("from_tensor_slices(x).batch(2).shuffle(3)", "shuffle() of batches"),
    ("from_tensor_slices(x).batch(2).batch(3)", "batch() twice"),
    ("from_tensors(x).batch(2)", "from_tensors()"),
    ("from_tensors(x).repeat().batch(2)", "repeat() without a count"),
    ("from_generator(g, tf.int32).batch(2)", "batch() of batches"),
    ("zip((a, b)).batch(2)", "zip()"),
    ("from_tensor_slices(x).batch(*a)", "arguments with a star"),
]


@pytest.mark.parametrize(("chain", "reason"), UNKNOWN)
def test_unknown_chain_is_marked_once(chain, reason) -> None:
    mark, line = body(f"d = tf.data.Dataset.{chain}\n").splitlines()
    assert f": {reason}: write it as sg.input.Dataset" in mark
    assert line.startswith("d = tf.data.Dataset.")


def test_lazy_statements_of_an_unknown_chain_stay() -> None:
    code = "d = tf.data.Dataset.from_tensor_slices(x)\nd = d.map(f)\nd = d.batch(2)\n"
    mark, *rest = body(code).splitlines(keepends=True)
    assert ": map(): " in mark
    assert "".join(rest) == code
