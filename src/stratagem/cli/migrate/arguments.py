"""Conversion of a call's arguments to the signature of its counterpart."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import libcst as cst

from stratagem.cli.migrate.rules import Argument, CallRule

_EMPTY = cst.Module([])


class ArgumentsRefusedError(Exception):
    """Raised for an argument that the counterpart does not have."""


def code_of(node: cst.CSTNode) -> str:
    """Returns the code of a node."""
    return _EMPTY.code_for_node(node)


def converted(call: CallRule, arguments: Sequence[cst.Arg]) -> list[cst.Arg]:
    """Returns the arguments for the counterpart; raises ArgumentsRefusedError if it lacks one."""
    if any(argument.star for argument in arguments):
        return list(arguments)
    specs = {spec.old: spec for spec in call.arguments}
    kept: list[cst.Arg] = []
    used: set[str] = set()
    is_in_order = True
    for index, argument in enumerate(arguments):
        spec = _spec_of(call, index, argument, specs)
        if spec is None:
            kept.append(argument)
            continue
        used.add(spec.old)
        if spec.refused and not _is_none(argument.value):
            raise ArgumentsRefusedError(spec.old)
        if spec.refused or not spec.new:
            is_in_order = False
            continue
        is_in_order = is_in_order and not spec.by_keyword
        is_positional = spec.new == "_" or (argument.keyword is None and is_in_order)
        kept.append(_with_keyword(argument, None if is_positional else spec.new))
    kept += [_default(spec) for spec in call.arguments if spec.default and spec.old not in used]
    return _with_commas(kept, arguments)


def filled_template(template: str, arguments: Sequence[cst.Arg]) -> str:
    """Returns the code of a template; raises ArgumentsRefusedError for others."""
    named = [one for one in arguments if one.keyword and one.keyword.value != "name"]
    positional = [one for one in arguments if one.keyword is None and not one.star]
    if named or any(one.star for one in arguments):
        raise ArgumentsRefusedError(named[0].keyword.value if named and named[0].keyword else "*")
    if not positional or f"{{{len(positional) - 1}}}" not in template:
        raise ArgumentsRefusedError(f"argument {len(positional)}")
    return template.format(*(code_of(one.value) for one in positional))


def as_indices(sizes: cst.BaseExpression) -> cst.BaseExpression:
    """Returns where `tf.split` cuts for a list of sizes; a number of parts stays.

    Raises ArgumentsRefusedError for a list that is not written out.
    """
    if isinstance(sizes, cst.Integer | cst.Name | cst.BinaryOperation | cst.Attribute):
        return sizes
    values = [code_of(one.value) for one in getattr(sizes, "elements", ())]
    if not values or not all(one.isdecimal() for one in values):
        raise ArgumentsRefusedError("sizes like these")
    ends = itertools.accumulate(int(one) for one in values[:-1])
    return cst.parse_expression(f"[{', '.join(map(str, ends))}]")


def renamed(
    arguments: Sequence[cst.Arg], renames: Mapping[str, str]
) -> tuple[list[cst.Arg], list[str]]:
    """Returns arguments with new keywords, and the texts of those that a person must change."""
    kept: list[cst.Arg] = []
    texts: list[str] = []
    for argument in arguments:
        new = renames.get(argument.keyword.value) if argument.keyword is not None else None
        if new is None:
            kept.append(argument)
        elif new.startswith("!"):
            texts.append(new[1:])
            kept.append(argument)
        elif new:
            kept.append(_with_keyword(argument, new))
    return _with_commas(kept, arguments), texts


def _spec_of(
    call: CallRule, index: int, argument: cst.Arg, specs: Mapping[str, Argument]
) -> Argument | None:
    if argument.keyword is not None:
        return specs.get(argument.keyword.value)
    return call.arguments[index] if index < len(call.arguments) else None


def _is_none(value: cst.BaseExpression) -> bool:
    return isinstance(value, cst.Name) and value.value in ("None", "False")


def _with_keyword(argument: cst.Arg, keyword: str | None) -> cst.Arg:
    if keyword is None:
        return argument.with_changes(keyword=None, equal=cst.MaybeSentinel.DEFAULT)
    if argument.keyword is not None:
        return argument.with_changes(keyword=cst.Name(keyword))
    no_space = cst.SimpleWhitespace("")
    equal = cst.AssignEqual(whitespace_before=no_space, whitespace_after=no_space)
    return argument.with_changes(keyword=cst.Name(keyword), equal=equal)


def _default(spec: Argument) -> cst.Arg:
    value = cst.parse_expression(spec.default or "None")
    return _with_keyword(cst.Arg(value), spec.new)


def _with_commas(kept: list[cst.Arg], original: Sequence[cst.Arg]) -> list[cst.Arg]:
    """Keeps the line breaks of the arguments when some are dropped or added."""
    if not kept or not original:
        return kept
    last = original[-1]
    commas = [one.comma for one in original[:-1] if isinstance(one.comma, cst.Comma)]
    between = commas[-1] if commas else cst.MaybeSentinel.DEFAULT
    rows = [
        one
        if isinstance(one.comma, cst.Comma) and one is not kept[-1]
        else _with_comma(one, between)
        for one in kept[:-1]
    ]
    end = kept[-1].with_changes(comma=last.comma, whitespace_after_arg=last.whitespace_after_arg)
    return [*rows, end]


def _with_comma(argument: cst.Arg, comma: cst.Comma | cst.MaybeSentinel) -> cst.Arg:
    return argument.with_changes(comma=comma)
