"""Rewriting of names: modules, functions with their arguments, methods, and enum members."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence

import libcst as cst

from stratagem.cli.migrate import rules
from stratagem.cli.migrate.context import FileContext, StatementRewriter, dotted
from stratagem.cli.migrate.rules import Advice, Argument, CallRule, Resolution

# Conversion of a call's arguments to the signature of its counterpart.

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
        is_none = isinstance(value := argument.value, cst.Name) and value.value in ("None", "False")
        if spec.refused and not is_none:
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
        one if isinstance(one.comma, cst.Comma) else one.with_changes(comma=between)
        for one in kept[:-1]
    ]
    end = kept[-1].with_changes(comma=last.comma, whitespace_after_arg=last.whitespace_after_arg)
    return [*rows, end]


# Calls whose counterpart depends on their place or on their arguments.


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
    last = [one.with_changes(comma=cst.MaybeSentinel.DEFAULT) for one in arguments[-1:]]
    return [*arguments[:-1], *last]


_PAGE = "docs/migrate/tool.md"
_SEED = Advice(
    "in a step, pass seed= with a keras.random.SeedGenerator created in the scope",
    "docs/migrate/guides.md",
)
_SEQUENTIAL = ("keras.Sequential", "keras.models.Sequential")
_BUILD = Advice(
    "begin the model with keras.Input(shape): sg.value_and_grad takes variables before its call",
    "docs/migrate/guides.md",
)
_SHAPES = ("input_shape", "batch_input_shape", "input_dim", "batch_shape")
_OLD_FIT_ARGUMENTS = {"workers": "", "use_multiprocessing": "", "max_queue_size": ""}
# Calls whose counterpart depends on their place or their arguments.
_BY_PLACE = (
    "print",
    "config.get_visible_devices",
    "config.list_physical_devices",
    "config.list_logical_devices",
    "config.experimental.list_physical_devices",
    "config.experimental.list_logical_devices",
)
_FIT = ("fit", "evaluate", "predict", "fit_generator", "evaluate_generator", "predict_generator")


def is_kept(name: str) -> bool:
    """Returns True if an import of a name stays, from Keras instead of TensorFlow."""
    found = rules.resolve(name)
    return found is not None and found.target + found.rest == name and name.split(".")[0] == "keras"


class NameRewriter(StatementRewriter):
    """Replaces names of TensorFlow; `steps` are the names of functions that replicas run."""

    def __init__(
        self, context: FileContext, steps: Collection[str], *, has_tapes: bool = False
    ) -> None:
        super().__init__(context)
        self._has_tapes = has_tapes
        self._steps = steps
        self._functions: list[str] = []
        self._new: dict[cst.CSTNode, cst.BaseExpression] = {}
        self._calls: dict[cst.CSTNode, Resolution] = {}
        self._skipped: set[cst.CSTNode] = set()

    def visit_Import(self, node: cst.Import) -> bool:
        """Leaves imports to their own pass."""
        return False

    def visit_ImportFrom(self, node: cst.ImportFrom) -> bool:
        """Leaves imports to their own pass."""
        return False

    def visit_FunctionDef(self, node: cst.FunctionDef) -> bool:
        """Enters a function."""
        self._functions.append(node.name.value)
        self._skipped.add(node.name)
        return True

    def leave_FunctionDef(
        self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef
    ) -> cst.FunctionDef:
        """Leaves a function."""
        self._functions.pop()
        return updated_node

    def visit_ClassDef(self, node: cst.ClassDef) -> bool:
        """Skips the name of a class."""
        self._skipped.add(node.name)
        return True

    def visit_Param(self, node: cst.Param) -> bool:
        """Skips the name of a parameter."""
        self._skipped.add(node.name)
        return True

    def visit_Arg(self, node: cst.Arg) -> bool:
        """Skips the keyword of an argument."""
        if node.keyword is not None:
            self._skipped.add(node.keyword)
        return True

    def visit_Call(self, node: cst.Call) -> bool:
        """Notes calls whose arguments change with the name."""
        name = self.tensorflow_name(node.func) if dotted(node.func) is not None else None
        if name is not None:
            if name in _BY_PLACE:
                self._calls[node] = Resolution(name, "")
                self._skipped.add(node.func)
            elif (found := rules.resolve(name)) is not None and not found.rest:
                self._calls[node] = found
        return True

    def visit_Attribute(self, node: cst.Attribute) -> bool:
        """Replaces a name with attributes as a whole."""
        if node in self._skipped:
            return False
        name = self.tensorflow_name(node) if dotted(node) is not None else None
        if name is None:
            self._skipped.add(node.attr)
            return True
        self._replace(node, name)
        return False

    def visit_Name(self, node: cst.Name) -> bool:
        """Replaces a name."""
        if node not in self._skipped and (name := self.tensorflow_name(node)) is not None:
            self._replace(node, name)
        return False

    def leave_Attribute(
        self, original_node: cst.Attribute, updated_node: cst.Attribute
    ) -> cst.BaseExpression:
        """Puts the new name in, and Keras's new name of the learning rate."""
        owner = dotted(updated_node.value) or ""
        if updated_node.attr.value == "lr" and owner.split(".")[-1] == "optimizer":
            return updated_node.with_changes(attr=cst.Name("learning_rate"))
        return self._new.get(original_node, updated_node)

    def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> cst.BaseExpression:
        """Puts the new name in."""
        return self._new.get(original_node, updated_node)

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:
        """Converts the arguments of a call."""
        found = self._calls.get(original_node)
        if found is None:
            return self._method(original_node, updated_node)
        if not found.target and not found.is_removed:
            if found.name == "print":
                return print_call(updated_node, self.context, in_step=self._is_in_step())
            return device_list(updated_node, self.context)
        if found.call is not None:
            return self._with_arguments(original_node, updated_node, found)
        if self._has_tapes and found.target in _SEQUENTIAL and _is_unbuilt(updated_node):
            self.mark(_BUILD)
        arguments, texts = renamed(updated_node.args, rules.keyword_rules(found.target))
        for text in texts:
            self.mark(Advice(text, _PAGE))
        return updated_node.with_changes(args=arguments)

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.SimpleStatementLine | cst.RemovalSentinel:
        """Drops statements that nothing here needs."""
        kept = [
            new
            for old, new in zip(original_node.body, updated_node.body, strict=True)
            if not self._is_unneeded(old)
        ]
        if not kept:
            return cst.RemoveFromParent()
        return updated_node.with_changes(body=kept)

    def _is_unneeded(self, node: cst.BaseSmallStatement) -> bool:
        """Returns True for calls without effect here, and for the choice of another backend."""
        if isinstance(node, cst.Assign) and len(node.targets) == 1:
            target = node.targets[0].target
            return isinstance(target, cst.Subscript) and "KERAS_BACKEND" in code_of(target)
        if not isinstance(node, cst.Expr) or not isinstance(node.value, cst.Call):
            return False
        return self._is_removed(node.value.func)

    def _is_removed(self, node: cst.BaseExpression) -> bool:
        if isinstance(node, cst.Attribute) and isinstance(node.value, cst.Call):
            return self._is_removed(node.value.func)
        name = self.tensorflow_name(node) if dotted(node) is not None else None
        found = rules.resolve(name) if name is not None else None
        return found is not None and found.is_removed

    def _is_in_step(self) -> bool:
        return any(name in self._steps for name in self._functions)

    def _replace(self, node: cst.Attribute | cst.Name, name: str) -> None:
        found = rules.resolve(name)
        if found is None or found.is_removed:
            self.mark(rules.advice(name))
            return
        code = self._shortened(node, found.target + found.rest)
        if code != dotted(node):
            self._new[node] = _like(node, self.context.expression(code))

    def _shortened(self, node: cst.BaseExpression, target: str) -> str:
        """Returns the new name, below the name of a module that the file has imported."""
        root = node
        while isinstance(root, cst.Attribute):
            root = root.value
        imported = self.tensorflow_name(root)
        if not imported or not is_kept(imported) or not isinstance(root, cst.Name):
            return target
        if target == imported or target.startswith(f"{imported}."):
            return root.value + target[len(imported) :]
        return target

    def _with_arguments(
        self, original: cst.Call, updated: cst.Call, found: Resolution
    ) -> cst.BaseExpression:
        call = found.call
        assert call is not None
        has_seed = any(one.keyword and one.keyword.value == "seed" for one in updated.args)
        if found.name.startswith("random.") and self._is_in_step() and not has_seed:
            self.mark(_SEED)
        try:
            if call.template is not None:
                code = filled_template(self.context.code(call.template), updated.args)
                return cst.parse_expression(code)
            arguments = converted(call, updated.args)
            if found.name == "split" and len(arguments) > 1:
                cut = arguments[1].with_changes(value=as_indices(arguments[1].value))
                arguments[1] = cut
            return updated.with_changes(args=arguments)
        except ArgumentsRefusedError as refused:
            text = f"tf.{found.name}: {call.target} has no {refused}"
            self.mark(Advice(text, _PAGE))
            return updated.with_changes(func=original.func)

    def _method(self, original: cst.Call, updated: cst.Call) -> cst.BaseExpression:
        function = updated.func
        if not isinstance(function, cst.Attribute):
            return updated
        name = function.attr.value
        if name == "numpy" and not updated.args:
            context = self.context
            return updated.with_changes(
                func=context.expression("np.asarray"), args=[cst.Arg(function.value)]
            )
        if name == "minimize" and any("global_step" in code_of(one) for one in original.args):
            minimize = self.context.expression("sg.estimator.minimize")
            loss = next(
                (one for one in updated.args if one.keyword is None or one.keyword.value == "loss"),
                None,
            )
            if loss is None:
                return updated
            arguments = [cst.Arg(function.value), cst.Arg(loss.value)]
            return updated.with_changes(func=minimize, args=arguments)
        if name in _FIT:
            arguments, _ = renamed(updated.args, _OLD_FIT_ARGUMENTS)
            updated = updated.with_changes(args=arguments)
        if (new := rules.method(name)) is not None:
            function = function.with_changes(attr=cst.Name(new))
            return updated.with_changes(func=function)
        return updated


def _like(node: cst.Attribute | cst.Name, new: cst.BaseExpression) -> cst.BaseExpression:
    """Returns an expression with the parentheses of the one it replaces."""
    if not node.lpar:
        return new
    return new.with_changes(lpar=node.lpar, rpar=node.rpar)


def _is_unbuilt(call: cst.Call) -> bool:
    """Returns True for a list of layers of which the first one gives no shape."""
    layers = call.args[0].value if call.args else None
    if not isinstance(layers, cst.List) or not layers.elements:
        return False
    first = layers.elements[0].value
    if not isinstance(first, cst.Call):
        return False
    name = (dotted(first.func) or "").split(".")[-1]
    keywords = {one.keyword.value for one in first.args if one.keyword is not None}
    return name not in ("Input", "InputLayer") and not keywords & set(_SHAPES)
