"""Rewriting of `tf.function`, and the functions that replicas or workers run."""

from __future__ import annotations

import dataclasses

import libcst as cst
import libcst.matchers as m

from stratagem.cli.migrate.context import FileContext, StatementRewriter

_RUN = ("run", "experimental_run_v2", "experimental_run", "call_for_each_replica", "run_steps")
_PLAIN = ("schedule", "create_per_worker_dataset", "distribute_datasets_from_function")
_READS = ("get_next", "get_next_as_optional")
_MAKES_DATA = ("distribute_datasets_from_function", "experimental_distribute_dataset")


@dataclasses.dataclass
class FunctionUses:
    """Names of functions that are compiled, and of those that must stay plain Python."""

    steps: set[str] = dataclasses.field(default_factory=set[str])
    plain: set[str] = dataclasses.field(default_factory=set[str])


def function_uses(module: cst.Module) -> FunctionUses:
    """Finds functions that are passed to `strategy.run`, and those a coordinator schedules."""
    uses = FunctionUses()
    for node in m.findall(module, m.Call(func=m.Attribute())):
        call = cst.ensure_type(node, cst.Call)
        method = cst.ensure_type(call.func, cst.Attribute).attr.value
        name = _first_name(call)
        if name is not None and method in _RUN:
            uses.steps.add(name)
        elif name is not None and method in _PLAIN:
            uses.plain.add(name)
    for node in m.findall(module, m.FunctionDef()):
        function = cst.ensure_type(node, cst.FunctionDef)
        if _must_stay_plain(function):
            uses.plain.add(function.name.value)
    return uses


def _first_name(call: cst.Call) -> str | None:
    """Returns the name of the function that a call is given, `f` for `self.f` too."""
    for argument in call.args[:1]:
        if isinstance(argument.value, cst.Name | cst.Attribute):
            value = argument.value
            return value.value if isinstance(value, cst.Name) else value.attr.value
    return None


def _must_stay_plain(function: cst.FunctionDef) -> bool:
    """Returns True if a function reads or makes a dataset itself, which a trace cannot."""
    parameters = [one.name.value for one in function.params.params]
    for name in parameters:
        reads = m.Call(func=m.Name("next"), args=[m.Arg(value=m.Name(name))])
        methods = m.OneOf(*(m.Name(one) for one in _READS))
        gets = m.Call(func=m.Attribute(value=m.Name(name), attr=methods))
        loops = m.For(iter=m.Name(name))
        if m.findall(function.body, m.OneOf(reads, gets, loops)):
            return True
    makes = m.OneOf(*(m.Name(one) for one in _MAKES_DATA))
    return bool(m.findall(function.body, m.Call(func=m.Attribute(attr=makes))))


class FunctionRewriter(StatementRewriter):
    """Drops `tf.function` where a function runs in a step, or reads a dataset itself."""

    def __init__(self, context: FileContext, uses: FunctionUses) -> None:
        super().__init__(context)
        self._uses = uses

    def leave_FunctionDef(
        self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef
    ) -> cst.FunctionDef:
        """Drops the decorator, keeping the comments above it."""
        name = original_node.name.value
        if name not in self._uses.steps | self._uses.plain:
            if any(self._is_function(one.decorator) for one in original_node.decorators):
                self._uses.steps.add(name)
            return updated_node
        kept = [
            new
            for old, new in zip(original_node.decorators, updated_node.decorators, strict=True)
            if not self._is_function(old.decorator)
        ]
        if len(kept) == len(updated_node.decorators):
            return updated_node
        after = () if kept else updated_node.lines_after_decorators
        return updated_node.with_changes(decorators=kept, lines_after_decorators=after)

    def leave_For(self, original_node: cst.For, updated_node: cst.For) -> cst.For:
        """Loops over a Python range where TensorFlow's loop was over a tensor."""
        call = original_node.iter
        if isinstance(call, cst.Call) and self.tensorflow_name(call.func) == "range":
            new = cst.ensure_type(updated_node.iter, cst.Call)
            return updated_node.with_changes(iter=new.with_changes(func=cst.Name("range")))
        return updated_node

    def _is_function(self, decorator: cst.BaseExpression) -> bool:
        node = decorator.func if isinstance(decorator, cst.Call) else decorator
        return self.tensorflow_name(node) == "function"
