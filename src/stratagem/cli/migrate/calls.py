"""Calls whose counterpart depends on their place or on their arguments."""

from __future__ import annotations

from collections.abc import Sequence

import libcst as cst

from stratagem.cli.migrate.arguments import code_of
from stratagem.cli.migrate.context import FileContext


def print_call(call: cst.Call, context: FileContext, *, in_step: bool) -> cst.BaseExpression:
    """Returns the counterpart of `tf.print`: `jax.debug.print` in a step, else `print`."""
    kept = [one for one in call.args if one.keyword is None]
    end = [one for one in call.args if one.keyword is not None and one.keyword.value == "end"]
    if not in_step or any(one.star for one in kept):
        return call.with_changes(func=cst.Name("print"), args=_without_last_comma([*kept, *end]))
    texts: list[str] = []
    values: list[str] = []
    for argument in kept:
        if isinstance(argument.value, cst.SimpleString):
            texts.append(str(argument.value.evaluated_value).replace("{", "{{").replace("}", "}}"))
        else:
            texts.append("{}")
            values.append(code_of(argument.value))
    text = " ".join(texts).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    inside = ", ".join([f'"{text}"', *values])
    return cst.parse_expression(f"{context.code('jax.debug.print')}({inside})")


def device_list(call: cst.Call, context: FileContext) -> cst.BaseExpression:
    """Returns the counterpart of `tf.config.list_physical_devices`."""
    devices = context.code("jax.devices()")
    if not call.args:
        return cst.parse_expression(devices)
    kind = call.args[0].value
    if isinstance(kind, cst.SimpleString):
        code = repr(str(kind.evaluated_value).lower()).replace("'", '"')
    else:
        code = f"{code_of(kind)}.lower()"
    return cst.parse_expression(f"[one for one in {devices} if one.platform == {code}]")


def _without_last_comma(arguments: Sequence[cst.Arg]) -> list[cst.Arg]:
    *rest, last = arguments or [None]
    if last is None:
        return []
    return [*(one for one in rest if one), last.with_changes(comma=cst.MaybeSentinel.DEFAULT)]
