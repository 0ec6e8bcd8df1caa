"""Templates whose head of `{% set name = value %}` lines can be set from outside."""

from __future__ import annotations

import importlib.resources
import re
import shlex
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from stratagem.messages import explain
from stratagem.optional_libraries import load

if TYPE_CHECKING:
    import jinja2
    import jinja2.nodes

__all__ = ["MAX_VARIABLE_BYTES", "Template", "packaged_template"]

MAX_VARIABLE_BYTES = 128 * 1024
"""Linux starts no process with a longer variable, its name and the zero at its end included."""

_NEEDED = {"needed_by": "Rendering", "install": "'stratagem[manifests]'"}
_TRUTH = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off", ""), False),
}


def packaged_template(file_name: str) -> str:
    """Returns a template that comes with the library.

    Args:
        file_name: its name.

    Returns:
        Its text.
    """
    folder = importlib.resources.files("stratagem.manifests") / "templates"
    return (folder / file_name).read_text(encoding="utf-8")


class Template:
    """A Jinja template; the `{% set %}` lines at its top are its variables.

    Filters beside Jinja's own: `quoted` gives a YAML string, `literal` keeps `$(NAME)` as it is
    where Kubernetes would fill it in, `variable(name)` refuses a value that is too long for an
    environment variable, `shell_words` splits a command line, `shell` quotes a word.

    Args:
        text: the template.
        name: what errors call it.

    Raises:
        ImportError: Jinja is not installed.
        ValueError: no template, or a variable has no value.

    Example:
        >>> from stratagem.manifests import Template
        >>> template = Template("{% set workers = 2 %}workers: {{ workers }}")
        >>> template.variables, template.render({"workers": "3"})
        ({'workers': 2}, 'workers: 3')
    """

    def __init__(self, text: str, name: str = "template") -> None:
        self._jinja = load("jinja2", **_NEEDED)
        self._nodes = load("jinja2.nodes", **_NEEDED)
        self._environment = _environment(self._jinja)
        self._text = text
        self._name = name
        self.variables: dict[str, Any] = self.values({})

    def values(self, overrides: Mapping[str, object]) -> dict[str, Any]:
        """Returns what the variables are.

        Args:
            overrides: values by variable, as text or as they are. Text becomes what the value in
                the template is: a number, a truth value, a list of words.

        Returns:
            The value of each variable.

        Raises:
            ValueError: a variable that the template does not have, or text of another kind.
        """
        _, header = self._parse(overrides)
        alone = self._nodes.Template(header, lineno=1)
        module = self._run(lambda: self._compiled(alone).make_module())
        values = {assign.target.name: getattr(module, assign.target.name) for assign in header}
        for variable, value in values.items():
            if isinstance(value, self._jinja.Undefined):
                raise ValueError(
                    explain(
                        f"{self._name}: variable {variable!r} is set from one that is not there.",
                        expected="a value, or a variable that is set above it.",
                        fix=f"write {{% set {variable} = ... %}} with a value.",
                    )
                )
        return values

    def render(self, overrides: Mapping[str, object] | None = None) -> str:
        """Returns the text with all values filled in.

        Args:
            overrides: values by variable, as for `values`.

        Returns:
            The text, without empty lines at its beginning.

        Raises:
            ValueError: as `values`; or the template cannot be filled in.
        """
        tree, _ = self._parse(overrides or {})
        return self._run(lambda: self._compiled(tree).render()).lstrip("\n")

    def _parse(self, overrides: Mapping[str, object]) -> tuple[jinja2.nodes.Template, list[Any]]:
        """The whole template and the `{% set %}` nodes at its top, with the overrides in them."""
        tree = self._run(lambda: self._environment.parse(self._text, filename=self._name))
        header: list[Any] = []
        for node in tree.body:
            if isinstance(node, self._nodes.Assign) and isinstance(node.target, self._nodes.Name):
                header.append(node)
            elif not self._is_white_space(node):
                break
        values = self._converted(overrides, [assign.target.name for assign in header])
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

    def _compiled(self, tree: jinja2.nodes.Template) -> jinja2.Template:
        tree.set_environment(self._environment)
        code = self._environment.compile(tree, filename=self._name)
        return self._environment.template_class.from_code(
            self._environment, code, self._environment.make_globals(None)
        )

    def _converted(self, overrides: Mapping[str, object], known: list[str]) -> dict[str, object]:
        """The overrides, text turned into what the template's own values are."""
        unknown = sorted(overrides.keys() - set(known))
        if unknown:
            raise ValueError(
                explain(
                    f"{self._name} has no variable {', '.join(map(repr, unknown))}.",
                    expected=f"one of {', '.join(sorted(known)) or 'none: it has no variables'}.",
                    fix="correct the name, or add a {% set %} line at the top of the template.",
                )
            )
        return {
            variable: _of_kind(variable, value, self.variables[variable])
            if isinstance(value, str)
            else value
            for variable, value in overrides.items()
        }

    def _run(self, work: Callable[[], Any]) -> Any:
        """What Jinja raises is about the template, of which the user may have written each line."""
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


def _environment(jinja2_module: Any) -> Any:
    """A template may come from anywhere: the sandbox keeps it from doing more than text."""
    environment = load("jinja2.sandbox", **_NEEDED).SandboxedEnvironment(
        undefined=jinja2_module.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters |= {
        "literal": _literal,
        "quoted": _quoted,
        "shell": shlex.quote,
        "shell_words": _shell_words,
        "variable": _variable,
    }
    return environment


def _of_kind(variable: str, text: str, default: object) -> object:
    """Text as a value of the same kind as the template's own."""
    if isinstance(default, bool):
        value = _TRUTH.get(text.strip().lower())
        expected = "true or false."
    elif isinstance(default, int):
        value = int(text) if re.fullmatch(r"\s*[+-]?[0-9]+\s*", text) else None
        expected = "a whole number."
    elif isinstance(default, list | tuple):
        return _shell_words(text)
    else:
        return text
    if value is None:
        raise ValueError(
            explain(
                f"{variable}={text!r} is of another kind than {default!r} in the template.",
                expected=expected,
                fix=f"give {variable} such a value.",
            )
        )
    return value


def _quoted(value: object) -> str:
    """A YAML string in double quotes; what may not stand in YAML as it is, is written as a code."""
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
    """The words of a command line; a list is one already."""
    if isinstance(value, list | tuple):
        return [str(word) for word in value]
    try:
        return shlex.split(str(value))
    except ValueError as error:
        raise ValueError(
            explain(
                f"{value!r} cannot be split into words: {error}.",
                expected="quotes in pairs, as in a shell.",
                fix="close the quote, or give a list of words.",
            )
        ) from error


def _variable(value: object, name: str) -> str:
    num_bytes = len(f"{name}={value}\0".encode())
    if num_bytes > MAX_VARIABLE_BYTES:
        raise ValueError(
            explain(
                f"{name} would be {num_bytes} bytes long.",
                expected=f"at most {MAX_VARIABLE_BYTES}, which is what a process can be given.",
                fix="choose a shorter name, or fewer tasks.",
            )
        )
    return str(value)
