"""Job descriptions of Kubernetes, KubeRay and Slurm, rendered from Jinja templates.

A template's `{% set name = value %}` lines at the top are its variables. Their values are checked
before anything is rendered. What is rendered is checked by the cluster that gets it.
"""

from __future__ import annotations

import contextlib
import importlib.resources
import math
import re
import shlex
import types
from collections.abc import Callable, Generator, Mapping
from typing import IO, TYPE_CHECKING, Any

import click

from stratagem.cli.commands import Commands
from stratagem.environment import load
from stratagem.errors import invalid
from stratagem.group.authentication.secret import new_secret

if TYPE_CHECKING:
    import jinja2
    import jinja2.nodes

# Linux's limit for one environment variable, including its name and the final zero byte.
_MAX_VARIABLE_BYTES = 128 * 1024

_REQUIREMENT = {"needed_by": "Rendering", "install": "'stratagem[clusters]'"}
_TRUTH = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off", ""), False),
}


def _packaged_template(file_name: str) -> str:
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
                raise invalid(
                    f"{self._name}: variable {variable!r} is set from an undefined variable.",
                    expected="a value, or a variable set above it.",
                    fix=f"write {{% set {variable} = ... %}} with a value.",
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
            raise invalid(
                f"{self._name} has no variable {', '.join(map(repr, unknown))}.",
                expected=f"one of {', '.join(sorted(known)) or 'none; it has no variables'}.",
                fix="correct the name, or add a {% set %} line at the top of the template.",
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
        "literal": lambda value: str(value).replace("$", "$$"),
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
        raise invalid(
            f"{variable}={text!r} has a different type than {default!r} in the template.",
            expected=expected,
            fix=f"pass a value of that type for {variable}.",
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


def _shell_words(value: object) -> list[str]:
    """Splits a command line into words; returns a list unchanged."""
    if isinstance(value, list | tuple):
        return [str(word) for word in value]
    try:
        return shlex.split(str(value))
    except ValueError as error:
        raise invalid(
            f"{value!r} cannot be split into words: {error}.",
            expected="quotes in pairs, as in a shell.",
            fix="close the quote, or pass a list of words.",
        ) from error


def _environment_value(value: object, name: str) -> str:
    num_bytes = len(f"{name}={value}\0".encode())
    if num_bytes > _MAX_VARIABLE_BYTES:
        raise invalid(
            f"The environment variable {name} would be {num_bytes} bytes long.",
            expected=f"at most {_MAX_VARIABLE_BYTES} bytes, the limit of Linux.",
            fix="choose a shorter name, or fewer tasks.",
        )
    return str(value)


# Values that a packaged template renders as they are meant. What else may be wrong with one, such
# as the name of an image, is for the cluster that gets it to say.

# Written without quotes in several places, which these letters cannot leave.
_NAME = "[a-z]([-a-z0-9]*[a-z0-9])?", "lowercase letters, digits and dashes, a letter first."
# A line of #SBATCH is one word: after a space or a line break comes another option.
_WORD = r"[^\s#]*", "one word."
_FILE = "(?s:.+)", "the path of a file."
_TEXT = "(?s:.*)", "text."
_FORMS: dict[str, tuple[str, str]] = {
    "train_dir": (r"/[^:]*[^:/][^:]*|[a-z0-9]+://\S+", "a folder as /path, or a URL."),
    "workload": ("Job|JobSet|TrainJob", "Job, JobSet or TrainJob."),
    "tpu_topology": (r"(\d+(x\d+){1,2})?", "a topology such as 4x4, or 2x2x4."),
    "python": _FILE,
}
# The least number, where that is not 0. A pod of root would never start.
_LEAST: dict[str, int] = dict.fromkeys(("worker_replicas", "tasks_per_node", "port", "user_id"), 1)


def _check_values(
    values: Mapping[str, object],
    packaged: str,
    forms: Mapping[str, tuple[str, str]],
    least: Mapping[str, int] = _LEAST,
) -> None:
    """Raises ValueError for a value of another type or form than in the packaged template.

    Variables of a custom template may be anything.
    """
    known = Template(packaged).variables
    for variable, value in values.items():
        default, (form, expected) = known.get(variable), forms.get(variable, _TEXT)
        if isinstance(default, bool):
            is_valid, expected = isinstance(value, bool), "True or False."
        elif isinstance(default, int):
            lowest = least.get(variable, 0)
            is_valid = type(value) is int and value >= lowest
            expected = f"an integer of at least {lowest}."
        elif variable == "cmdline_args" and isinstance(value, list | tuple):
            is_valid, expected = all(map(_is_text, value)), "text, or a list of words."
        else:
            is_valid = default is None or (_is_text(value) and re.fullmatch(form, str(value)))
        if not is_valid:
            raise invalid(
                f"{variable}={value!r} is not valid.",
                expected=expected,
                fix=f"set {variable} to such a value.",
            )


def _is_text(value: object) -> bool:
    """Returns True if a process accepts the string as an argument."""
    return isinstance(value, str) and re.search("[\0\ud800-\udfff]", value) is None


# Kubernetes manifests of a training cluster.

_KUBERNETES_TEMPLATE = "template.yaml.jinja"


def kubernetes_template() -> str:
    """Returns the text of the packaged template; a `{% set %}` line defines each variable.

    Source: tensorflow/ecosystem, distribution_strategy/template.yaml.jinja: the variables' names.
    """
    return _packaged_template(_KUBERNETES_TEMPLATE)


def render_kubernetes(
    overrides: Mapping[str, object] | None = None,
    template: str | None = None,
    name: str = _KUBERNETES_TEMPLATE,
) -> str:
    """Returns the manifests of a training cluster, as YAML for `kubectl create -f -`.

    `overrides` sets template variables, as strings or as Python values. `template` is the text of a
    custom template; `name` names it in errors. Raises ImportError without Jinja, ValueError for an
    unknown variable, an invalid value or template.

    Example:
        >>> from stratagem.cli.manifests.rendering import render_kubernetes
        >>> manifests = render_kubernetes({"name": "train", "worker_replicas": 3})
        >>> "train-worker-2.train-worker:5000" in manifests
        True
    """
    own = Template(kubernetes_template() if template is None else template, name)
    values = own.values(overrides or {})
    _check_values(values, kubernetes_template(), {**_FORMS, "name": _NAME, "script": _FILE})
    return own.render(overrides)


# KubeRay manifests of a training cluster.

_RAY_TEMPLATE = "ray.yaml.jinja"


def ray_template() -> str:
    """Returns the text of the packaged template; a `{% set %}` line defines each variable."""
    return _packaged_template(_RAY_TEMPLATE)


def render_ray(
    overrides: Mapping[str, object] | None = None,
    template: str | None = None,
    name: str = _RAY_TEMPLATE,
) -> str:
    """Returns the manifests of a Ray cluster that runs programs of remote clients.

    They are YAML for `kubectl create -f -`, and need the KubeRay operator. With a `script`, the
    cluster runs it and ends (a RayJob). Arguments and errors as in `render_kubernetes`.

    Example:
        >>> from stratagem.cli.manifests.rendering import render_ray
        >>> "kind: RayCluster" in render_ray({"name": "train", "worker_replicas": 3})
        True
    """
    own = Template(ray_template() if template is None else template, name)
    values = own.values(overrides or {})
    # A program of parameter servers would wait for the first one.
    _check_values(values, ray_template(), {"name": _NAME}, {**_LEAST, "ps_replicas": 1})
    return own.render(overrides)


# Slurm batch scripts of a training job.

_SLURM_TEMPLATE = "slurm.sh.jinja"


def slurm_template() -> str:
    """Returns the text of the packaged template; a `{% set %}` line defines each variable."""
    return _packaged_template(_SLURM_TEMPLATE)


def render_slurm(
    overrides: Mapping[str, object] | None = None,
    template: str | None = None,
    name: str = _SLURM_TEMPLATE,
    *,
    nodes: int | None = None,
) -> str:
    """Returns the batch script of a training job, for `sbatch`.

    `nodes` sets `worker_replicas`, or else `tasks_per_node`, unless `overrides` does; None uses as
    many nodes as the tasks need. The nodes of servers count unless they are `heterogeneous`.
    Otherwise as `render_kubernetes`, and ValueError if the tasks do not need exactly `nodes` nodes,
    or for an array of heterogeneous jobs, which Slurm does not have.

    Example:
        >>> from stratagem.cli.manifests.rendering import render_slurm
        >>> script = render_slurm({"tasks_per_node": 4}, nodes=2)
        >>> "#SBATCH --ntasks=8" in script
        True
    """
    own = Template(slurm_template() if template is None else template, name)
    values = own.values(overrides or {})
    words = dict.fromkeys(("name", "partition", "time", "array"), _WORD)
    _check_values(values, slurm_template(), {**_FORMS, **words, "script": _FILE})
    if values.get("heterogeneous") and values.get("array"):
        raise invalid(
            f"array={values['array']!r} was given with heterogeneous=True.",
            expected="one of them: Slurm has no arrays of heterogeneous jobs.",
            fix="omit heterogeneous, or submit several jobs.",
        )
    updated = dict(overrides or {})
    if nodes is not None:
        updated = _fit_to_nodes(nodes, updated, values)
    return own.render(updated)


def _fit_to_nodes(
    nodes: int, updated: dict[str, object], values: Mapping[str, int]
) -> dict[str, object]:
    """Returns the overrides, with workers or tasks per node derived from the number of nodes."""
    if nodes < 1:
        raise invalid(
            f"nodes={nodes} is not a number of nodes.",
            expected="at least one node.",
            fix="request 1 or more.",
        )
    workers, on_a_node = values["worker_replicas"], values["tasks_per_node"]
    num_servers = 0 if values.get("heterogeneous") else values.get("ps_replicas", 0)
    others = num_servers + 1 if num_servers else 0  # and the coordinator
    if "worker_replicas" not in updated:
        workers = nodes * on_a_node - others
    elif "tasks_per_node" not in updated:
        on_a_node = math.ceil((workers + others) / nodes)
    _check_values({"worker_replicas": workers}, slurm_template(), {})
    needed = math.ceil((workers + others) / on_a_node)
    if needed != nodes:
        servers = f" and {others} tasks of servers" if others else ""
        raise invalid(
            f"{workers} workers{servers} at {on_a_node} per node need {needed} nodes, but "
            f"{nodes} were requested.",
            expected="exactly as many nodes as the tasks need.",
            fix="omit the number of nodes, of workers, or of tasks per node.",
        )
    return {**updated, "worker_replicas": workers, "tasks_per_node": on_a_node}


# The commands: `stratagem kubernetes` and `stratagem slurm`.


def template_argument(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the argument for a custom template."""
    return click.argument("template", required=False, type=click.File(encoding="utf-8"))(command)


def assignments_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds `--set`, which sets any variable of the template."""
    return click.option(
        "--set",
        "assignments",
        metavar="NAME=VALUE",
        multiple=True,
        help="Set any variable of the template; repeatable.",
    )(command)


def overrides(
    flags: Mapping[str, object | None], assignments: tuple[str, ...]
) -> dict[str, object]:
    """Merges flags and `--set` assignments such as "port=6000" into values by variable.

    A flag of None was not given. The last assignment of a variable wins. Raises UsageError for an
    assignment without "=", or a variable set both ways.
    """
    values: dict[str, object] = {}
    for assignment in assignments:
        variable, sign, text = assignment.partition("=")
        if not sign:
            raise click.UsageError(f"--set {assignment}: expected NAME=VALUE.")
        values[variable.strip()] = text
    given = {variable: value for variable, value in flags.items() if value is not None}
    twice = sorted(values.keys() & given.keys())
    if twice:
        raise click.UsageError(f"{twice[0]} is set by --set and by its flag: omit one of them.")
    return values | given


def template_arguments(template: IO[str] | None) -> dict[str, str]:
    """Returns the arguments `template` and `name` of a render function, if not the packaged one."""
    return {} if template is None else {"template": template.read(), "name": template.name}


@contextlib.contextmanager
def errors_as_messages() -> Generator[None]:
    """Turns invalid values and missing libraries into messages of the command."""
    try:
        yield
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    except ImportError as error:
        raise click.ClickException(str(error)) from error


_ray_option = click.option(
    "--ray",
    is_flag=True,
    help="Use a KubeRay cluster that runs programs of remote clients, or --script.",
)


@click.group("kubernetes", cls=Commands)
def kubernetes_group() -> None:
    """Render manifests for Kubernetes."""


@kubernetes_group.command("render")
@template_argument
@click.option("--name", help="Prefix of all resource names.")
@click.option("--image", help="Container image of every task.")
@click.option("--workers", "worker_replicas", type=int, help="Number of workers.")
@click.option("--ps", "ps_replicas", type=int, help="Number of parameter servers.")
@click.option("--input-workers", "input_replicas", type=int, help="Number of input workers.")
@click.option("--gpus-per-worker", "num_gpus_per_worker", type=int, help="GPUs per worker.")
@click.option("--evaluator/--no-evaluator", "has_eval", default=None, help="Add an evaluator.")
@click.option(
    "--tensorboard/--no-tensorboard", "has_tensorboard", default=None, help="Add TensorBoard."
)
@click.option("--script", help="Path of the script in the image.")
@click.option("--args", "cmdline_args", help="Script arguments in one string, shell-quoted.")
@click.option(
    "--workload",
    type=click.Choice(["Job", "JobSet", "TrainJob"]),
    help="One Job per role, or a JobSet or Kubeflow TrainJob for all of them.",
)
@click.option("--queue", help="Kueue's LocalQueue that admits the run.")
@click.option("--port", type=int, help="Port of every task; with --ray, the port for jobs.")
@_ray_option
@assignments_option
def _render_kubernetes(
    template: IO[str] | None, assignments: tuple[str, ...], *, ray: bool, **flags: object
) -> None:
    """Print manifests for `kubectl create -f -`.

    TEMPLATE is an edited copy of the output of `stratagem kubernetes template`, or "-" for standard
    input; by default the packaged template.
    """
    with errors_as_messages():
        render_form = render_ray if ray else render_kubernetes
        text = render_form(overrides(flags, assignments), **template_arguments(template))
    click.echo(text, nl=False)


@kubernetes_group.command("template")
@_ray_option
def _print_kubernetes(*, ray: bool) -> None:
    """Print the packaged template, for editing."""
    text = ray_template() if ray else kubernetes_template()
    click.echo(text, nl=False)


@click.group("slurm", cls=Commands)
def slurm_group() -> None:
    """Render batch scripts for Slurm."""


@slurm_group.command("render")
@template_argument
@click.option("--name", help="Job name.")
@click.option("--workers", "worker_replicas", type=int, help="Number of workers (Slurm tasks).")
@click.option("--ps", "ps_replicas", type=int, help="Number of parameter servers.")
@click.option(
    "--heterogeneous/--homogeneous",
    default=None,
    help="Servers on nodes of their own, without GPUs, by a heterogeneous job.",
)
@click.option("--nodes", type=int, help="Number of nodes; sets the workers, or vice versa.")
@click.option("--tasks-per-node", type=int, help="Tasks per node.")
@click.option("--gpus-per-worker", "num_gpus_per_worker", type=int, help="GPUs per worker.")
@click.option("--partition", help="Slurm partition.")
@click.option("--time", help="Time limit in Slurm's format, such as 12:00:00.")
@click.option("--array", help="Indices of an array of jobs, such as 0-7%2.")
@click.option("--script", help="Script that every worker runs, or the coordinator.")
@click.option("--args", "cmdline_args", help="Script arguments in one string, shell-quoted.")
@assignments_option
def _render_slurm(
    template: IO[str] | None, nodes: int | None, assignments: tuple[str, ...], **flags: object
) -> None:
    """Print a script for `sbatch`.

    TEMPLATE is an edited copy of the output of `stratagem slurm template`, or "-" for standard
    input; by default the packaged template.
    """
    with errors_as_messages():
        text = render_slurm(
            overrides(flags, assignments), nodes=nodes, **template_arguments(template)
        )
    click.echo(text, nl=False)


@slurm_group.command("template")
def _print_slurm() -> None:
    """Print the packaged template, for editing."""
    click.echo(slurm_template(), nl=False)
