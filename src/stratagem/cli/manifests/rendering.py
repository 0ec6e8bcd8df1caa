"""Jinja templates with overridable `{% set name = value %}` variables at the top."""

from __future__ import annotations

import importlib.resources
import re
import shlex
import types
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from stratagem.environment import load
from stratagem.errors import explain
from stratagem.group.authentication.secret import new_secret

if TYPE_CHECKING:
    import jinja2
    import jinja2.nodes


MAX_VARIABLE_BYTES = 128 * 1024
"""Linux's limit for one environment variable, including its name and the final zero byte."""

_REQUIREMENT = {"needed_by": "Rendering", "install": "'stratagem[clusters]'"}
_TRUTH = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off", ""), False),
}


def packaged_template(file_name: str) -> str:
    """Returns the text of a packaged template."""
    folder = importlib.resources.files("stratagem.cli.manifests") / "templates"
    return (folder / file_name).read_text(encoding="utf-8")


class Template:
    """A Jinja template; the `{% set %}` lines at its top are its variables.

    Filters in addition to Jinja's: `quoted` makes a YAML string, `literal` escapes `$(NAME)` so
    that Kubernetes does not expand it, `variable(name)` rejects a value too long for an
    environment variable, `shell_words` splits a command line, `shell` quotes a word. The function
    `new_secret` returns a random text.

    `name` names the template in errors. Raises ImportError without Jinja, ValueError for an invalid
    template or a variable without a value.

    Example:
        >>> from stratagem.cli.manifests.rendering import Template
        >>> template = Template("{% set workers = 2 %}workers: {{ workers }}")
        >>> template.variables, template.render({"workers": "3"})
        ({'workers': 2}, 'workers: 3')
    """

    def __init__(self, text: str, name: str = "template") -> None:
        self._jinja = load("jinja2", **_REQUIREMENT)
        self._nodes = load("jinja2.nodes", **_REQUIREMENT)
        self._environment = _environment(self._jinja)
        self._text = text
        self._name = name
        self.variables: dict[str, Any] = self.values({})

    def values(self, overrides: Mapping[str, object]) -> dict[str, Any]:
        """Returns the value of each variable, after `overrides`.

        A string is converted to the type of the template's own value: a number, a bool, or a list
        of words. Raises ValueError for an unknown variable or an invalid string.
        """
        _, header = self._parse(overrides)
        alone = self._nodes.Template(header, lineno=1)
        module = self._run(lambda: self._compile(alone).make_module())
        values = {assign.target.name: getattr(module, assign.target.name) for assign in header}
        for variable, value in values.items():
            if isinstance(value, self._jinja.Undefined):
                raise ValueError(
                    explain(
                        f"{self._name}: variable {variable!r} is set from an undefined variable.",
                        expected="a value, or a variable set above it.",
                        fix=f"write {{% set {variable} = ... %}} with a value.",
                    )
                )
        return values

    def render(self, overrides: Mapping[str, object] | None = None) -> str:
        """Returns the rendered text without leading empty lines; raises ValueError as `values`."""
        tree, _ = self._parse(overrides or {})
        return self._run(lambda: self._compile(tree).render()).lstrip("\n")

    def _parse(self, overrides: Mapping[str, object]) -> tuple[jinja2.nodes.Template, list[Any]]:
        """Returns the parsed template and its `{% set %}` nodes, overrides applied."""
        tree = self._run(lambda: self._environment.parse(self._text, filename=self._name))
        header: list[Any] = []
        for node in tree.body:
            if isinstance(node, self._nodes.Assign) and isinstance(node.target, self._nodes.Name):
                header.append(node)
            elif not self._is_white_space(node):
                break
        values = self._convert_overrides(overrides, [assign.target.name for assign in header])
        for assign in header:
            if assign.target.name in values:
                value = values[assign.target.name]
                assign.node = self._nodes.Const(value, lineno=assign.lineno)
        return tree, header

    def _is_white_space(self, node: Any) -> bool:
        return isinstance(node, self._nodes.Output) and all(
            isinstance(part, self._nodes.TemplateData) and not part.data.strip()
            for part in node.nodes
        )

    def _compile(self, tree: jinja2.nodes.Template) -> jinja2.Template:
        tree.set_environment(self._environment)
        code = self._environment.compile(tree, filename=self._name)
        return self._environment.template_class.from_code(
            self._environment, code, self._environment.make_globals(None)
        )

    def _convert_overrides(
        self, overrides: Mapping[str, object], known: list[str]
    ) -> dict[str, object]:
        """Returns the overrides, with strings converted to the types of the template's values."""
        unknown = sorted(overrides.keys() - set(known))
        if unknown:
            raise ValueError(
                explain(
                    f"{self._name} has no variable {', '.join(map(repr, unknown))}.",
                    expected=f"one of {', '.join(sorted(known)) or 'none; it has no variables'}.",
                    fix="correct the name, or add a {% set %} line at the top of the template.",
                )
            )
        return {
            variable: _convert_to_type_of(variable, value, self.variables[variable])
            if isinstance(value, str)
            else value
            for variable, value in overrides.items()
        }

    def _run(self, work: Callable[[], Any]) -> Any:
        """Runs Jinja; its errors become ValueErrors that name the template and the line."""
        try:
            return work()
        except (
            self._jinja.TemplateError,
            ArithmeticError,
            AttributeError,
            LookupError,
            TypeError,
            ValueError,
        ) as error:
            line = getattr(error, "lineno", None)
            where = self._name if line is None else f"{self._name}, line {line}"
            raise ValueError(f"{where}: {error}") from error


def _environment(jinja2_module: types.ModuleType) -> Any:
    """Returns a sandboxed environment, since a template may come from anywhere."""
    environment = load("jinja2.sandbox", **_REQUIREMENT).SandboxedEnvironment(
        undefined=jinja2_module.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.globals["new_secret"] = new_secret
    environment.filters |= {
        "literal": _literal,
        "quoted": _quoted,
        "shell": shlex.quote,
        "shell_words": _shell_words,
        "variable": _environment_value,
    }
    return environment


def _convert_to_type_of(variable: str, text: str, default: object) -> object:
    """Converts a string to the type of the template's own value."""
    if isinstance(default, bool):
        value = _TRUTH.get(text.strip().lower())
        expected = "true or false."
    elif isinstance(default, int):
        value = int(text) if re.fullmatch(r"\s*[+-]?[0-9]+\s*", text) else None
        expected = "an integer."
    elif isinstance(default, list | tuple):
        return _shell_words(text)
    else:
        return text
    if value is None:
        raise ValueError(
            explain(
                f"{variable}={text!r} has a different type than {default!r} in the template.",
                expected=expected,
                fix=f"pass a value of that type for {variable}.",
            )
        )
    return value


def _quoted(value: object) -> str:
    """Returns a double-quoted YAML string; unprintable characters are escaped."""
    escapes = {'"': '\\"', "\\": "\\\\"}
    return '"{}"'.format(
        "".join(
            escapes.get(letter, letter if letter.isprintable() else f"\\U{ord(letter):08x}")
            for letter in str(value)
        )
    )


def _literal(value: object) -> str:
    return str(value).replace("$", "$$")


def _shell_words(value: object) -> list[str]:
    """Splits a command line into words; returns a list unchanged."""
    if isinstance(value, list | tuple):
        return [str(word) for word in value]
    try:
        return shlex.split(str(value))
    except ValueError as error:
        raise ValueError(
            explain(
                f"{value!r} cannot be split into words: {error}.",
                expected="quotes in pairs, as in a shell.",
                fix="close the quote, or pass a list of words.",
            )
        ) from error


def _environment_value(value: object, name: str) -> str:
    num_bytes = len(f"{name}={value}\0".encode())
    if num_bytes > MAX_VARIABLE_BYTES:
        raise ValueError(
            explain(
                f"The environment variable {name} would be {num_bytes} bytes long.",
                expected=f"at most {MAX_VARIABLE_BYTES} bytes, the limit of Linux.",
                fix="choose a shorter name, or fewer tasks.",
            )
        )
    return str(value)
