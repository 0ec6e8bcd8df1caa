"""Calls whose counterpart depends on their arguments."""

from __future__ import annotations

import libcst as cst
import pytest

from stratagem.cli.migrate.context import FileContext
from stratagem.cli.migrate.names import code_of, device_list, print_call


def _call(code: str) -> cst.Call:
    return cst.ensure_type(cst.parse_expression(code), cst.Call)


@pytest.mark.parametrize(
    ("code", "in_step", "expected"),
    [
        ("tf.print()", False, "print()"),
        ("tf.print(x, end='')", False, "print(x, end='')"),
        ("tf.print(x, summarize=3)", False, "print(x)"),
        ("tf.print(x)", True, 'jax.debug.print("{}", x)'),
        ("tf.print('say \"a\"', f(x, 1))", True, 'jax.debug.print("say \\"a\\" {}", f(x, 1))'),
        ("tf.print(*x)", True, "print(*x)"),
    ],
)
def test_print(code, in_step, expected) -> None:
    context = FileContext()
    assert code_of(print_call(_call(code), context, in_step=in_step)) == expected
    assert ("jax" in context.needed) == expected.startswith("jax")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", "jax.devices()"),
        ("'TPU'", '[one for one in jax.devices() if one.platform == "tpu"]'),
        ("device_type=k", "[one for one in jax.devices() if one.platform == k.lower()]"),
    ],
)
def test_devices(arguments, expected) -> None:
    assert code_of(device_list(_call(f"f({arguments})"), FileContext())) == expected
