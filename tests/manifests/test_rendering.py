"""Templates: variables, overrides and errors."""

from __future__ import annotations

import sys

import pytest
import yaml

from stratagem.cli.manifests.rendering import Template

_TEMPLATE = """{# a comment #}
{%- set name = "example" -%}
{%- set replicas = 2 -%}
{% set big = False %}
{% set share = 0.5 %}
{% set title = name ~ "!" %}
{% set words = ["a", "b"] %}
{% macro shown() %}
{{ name }} {{ replicas + 1 }} {{ big }} {{ title }} {{ words | join("+") }}
{% endmacro %}
{% set late = 1 %}
{{ shown() }}
"""


def test_variables_are_the_lines_at_the_top() -> None:
    assert Template(_TEMPLATE).variables == {
        "name": "example",
        "replicas": 2,
        "big": False,
        "share": 0.5,
        "title": "example!",
        "words": ["a", "b"],
    }


@pytest.mark.parametrize(
    ("overrides", "shown"),
    [
        ({}, "example 3 False example! a+b"),
        ({"replicas": 7}, "example 8 False example! a+b"),
        ({"replicas": " -7 ", "big": "Yes"}, "example -6 True example! a+b"),
        ({"name": "7", "title": "t"}, "7 3 False t a+b"),
        ({"name": "x"}, "x 3 False x! a+b"),
        ({"words": "c 'd e'"}, "example 3 False example! c+d e"),
        ({"words": ["f"], "big": True}, "example 3 True example! f"),
    ],
)
def test_string_is_converted_to_the_type_in_the_template(overrides, shown) -> None:
    assert Template(_TEMPLATE).render(overrides).strip() == shown


@pytest.mark.parametrize("text", ["", "no variables", "{{ 1 }}{% set late = 1 %}"])
def test_template_without_variables_has_none(text) -> None:
    template = Template(text, "mine")
    assert template.variables == {}
    with pytest.raises(ValueError, match=r"mine has no variable 'late'(?s:.)*at the top of"):
        template.render({"late": 2})


def test_unknown_variables_are_all_named_with_those_that_there_are() -> None:
    with pytest.raises(ValueError, match=r"no variable 'a', 'b'(?s:.)*big, name, replicas, share"):
        Template(_TEMPLATE).values({"b": 1, "a": 1, "name": "x"})


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"replicas": "2.5"}, r"replicas='2.5' has a different type than 2(?s:.)*an integer"),
        ({"replicas": "+-2"}, "pass a value of that type for replicas"),
        ({"big": "2"}, r"big='2' has a different type than False(?s:.)*true or false"),
        ({"words": "it's"}, r"cannot be split into words(?s:.)*quotes in pairs"),
    ],
)
def test_string_of_another_type_is_named(overrides, message) -> None:
    with pytest.raises(ValueError, match=message):
        Template(_TEMPLATE).render(overrides)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{% set a = %}", "mine, line 1: "),
        ("ok\n{% if %}", "mine, line 2: "),
        (
            "{% set a = b %}",
            r"mine: variable 'a' is set from an undefined variable(?s:.)*set above it",
        ),
        ("{{ missing }}", "mine: 'missing' is undefined"),
        ("{{ 1 / 0 }}", "mine: division by zero"),
        ("{{ 'a' + 1 }}", "mine: can only concatenate"),
        ("{{ [][1] }}", "mine: "),
        ("{{ ''.__class__.__mro__ }}", "mine: access to attribute '__class__'"),
        ("{{ 'a \"' | shell_words }}", "mine: 'a \"' cannot be split into words"),
        ("{% include 'other' %}", "mine: "),
        ("{{ range(1000000) | list }}", "mine: Range too big"),
    ],
)
def test_wrong_template_is_named(text, message) -> None:
    with pytest.raises(ValueError, match=message):
        Template(text, "mine").render()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "plain",
        "\"'\\",
        "a: b # c",
        "\x00\x07\t\n\r\x1b\x7f\x80\x85\xa0\xad",
        "\u2028\u2029\ufeff\ufffe",
        "gr\u00fc\u00df \u65e5 \U0001f600 \U000e0001",
        "{{ x }} {% y %} $(A)",
    ],
)
def test_quoted_text_is_read_back_from_yaml(text) -> None:
    rendered = Template('{% set value = "" %}\nkey: {{ value | quoted }}\n').render({"value": text})
    assert yaml.safe_load(rendered) == {"key": text}


def test_values_are_text_and_no_templates() -> None:
    template = Template('{% set value = "" %}{{ value }}')
    assert template.render({"value": "{{ 1 + 1 }}{% raw %}"}) == "{{ 1 + 1 }}{% raw %}"


def test_value_too_long_for_a_process_is_refused() -> None:
    template = Template('{% set value = "" %}{{ value | variable("NAME") }}')
    fits = "x" * (128 * 1024 - len("NAME=") - 1)
    assert template.render({"value": fits}) == fits
    with pytest.raises(
        ValueError,
        match=r"The environment variable NAME would be 131073 bytes long(?s:.)*at most 131072",
    ):
        template.render({"value": f"{fits}x"})


def test_library_that_is_missing_is_named(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ImportError, match=r"Rendering needs jinja2(?s:.)*'stratagem\[clusters\]'"):
        Template("")
