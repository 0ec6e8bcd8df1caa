"""Names that code reads and assigns."""

from __future__ import annotations

import symtable

import pytest

from stratagem.cli.migrate import tapes as name_uses

CODE = [
    ("x = y", ["x"], {"y"}, []),
    ("x += y", ["x"], {"x", "y"}, ["x"]),
    ("x = x + 1", ["x"], {"x"}, ["x"]),
    ("x = 1\nz = x", ["x", "z"], {"x"}, []),
    ("for i in a:\n    b = i", ["i", "b"], {"a", "i"}, []),
    ("a.b = c", [], {"a", "c"}, []),
    ("f = lambda u, v=w: u + t", ["f"], {"w", "t"}, []),
    ("y = [i for i in a if c]", ["y"], {"a", "c"}, []),
    ("def f(a, *b, c=d, **e):\n    g = a\n    return g + h", ["f"], {"d", "h"}, []),
    ("@dec\ndef f():\n    pass", ["f"], {"dec"}, []),
    ("class A(B):\n    x = y", ["x", "A"], {"B", "y"}, []),
    ("import a.b, c as d\nfrom e import f", ["a", "d", "f"], set(), []),
    ("with a as b:\n    pass", ["b"], {"a"}, []),
    ("if (n := f()):\n    x = n", ["n", "x"], {"f", "n"}, []),
    ("x, (y, *z) = w", ["x", "y", "z"], {"w"}, []),
]


@pytest.mark.parametrize(("code", "stored", "read", "first"), CODE)
def test_names(code, stored, read, first) -> None:
    nodes = name_uses.parsed(code)
    assert sorted(name_uses.stores(nodes)) == sorted(stored)
    assert name_uses.free_loads(nodes) == read
    assert name_uses.read_first(nodes) == first


# From Python 3.12 on, the table lists the names of comprehensions among those around them.
@pytest.mark.parametrize(
    "code",
    [
        code
        for code, *_ in CODE
        if not code.startswith(("class", "for", "if", "with")) and "[i for" not in code
    ],
)
def test_assigned_names_are_those_of_the_symbol_table(code) -> None:
    table = symtable.symtable(code, "<test>", "exec")
    expected = {one.get_name() for one in table.get_symbols() if one.is_assigned()}
    expected |= {one.get_name() for one in table.get_symbols() if one.is_imported()}
    assert set(name_uses.stores(name_uses.parsed(code))) == expected


@pytest.mark.parametrize(
    ("code", "jump"),
    [
        ("def f():\n    return 1", None),
        ("for x in y:\n    break", None),
        ("while x:\n    if y:\n        continue", None),
        ("x = 1", None),
        ("if x:\n    continue", "continue"),
        ("return x", "return"),
        ("x = yield y", "yield"),
        ("global x", "global"),
        ("del x", "delete"),
    ],
)
def test_jump(code, jump) -> None:
    assert name_uses.has_jump(name_uses.parsed(code)) == jump
