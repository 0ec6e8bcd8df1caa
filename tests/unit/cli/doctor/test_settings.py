"""Clusters with mistakes: what each resolver says, ports that are taken, hosts that are away."""

from __future__ import annotations

import getpass
import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.text import Text

from stratagem.cli.doctor import clusters
from stratagem.cli.doctor.findings import Finding, Level, describe, facts, redacted, show
from stratagem.cli.doctor.settings import check_script, check_settings, keras_backend
from stratagem.cli.doctor.versions import (
    check_versions,
    installed_versions,
    parsed,
    requirements,
)
from stratagem.cluster.detection import ENVIRONMENTS
from tests.unit.cli.doctor.environments import closed_port, cluster


@pytest.fixture
def port() -> Iterator[int]:
    """A port that somebody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_no_cluster_is_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    (finding,) = clusters.examine_clusters()
    assert finding.level is Level.OK
    assert finding.text.startswith("No cluster is described by TF_CONFIG")


def test_tf_config_without_its_cluster_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", '{"worker": ["a:1", "b:1"]}')
    (finding,) = clusters.examine_clusters()
    assert finding.level is Level.WARNING
    assert "has no key 'cluster'" in finding.text
    assert '{"cluster": {"worker"' in finding.fix


def test_cluster_whose_machines_answer_is_fine(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    own = f"127.0.0.1:{closed_port()}"
    workers = [own, f"127.0.0.1:{port}", f"127.0.0.1:{closed_port()}"]
    monkeypatch.setenv("TF_CONFIG", cluster(workers))
    findings = list(clusters.examine_clusters())
    assert [one.level for one in findings] == [Level.OK] * 3
    assert findings[0].text == ("TF_CONFIG: 3 processes in lockstep, this is worker 0; 3 worker.")
    assert findings[1].text == f"This machine can listen at {own}."
    assert findings[2].text == "All 2 other tasks can be reached."


def test_parameter_server_has_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = [f"127.0.0.1:{closed_port()}" for _ in range(2)]
    jobs = {"worker": addresses[:1], "ps": addresses[1:]}
    config = {"cluster": jobs, "task": {"type": "ps", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    findings = list(clusters.examine_clusters())
    assert [one.level for one in findings] == [Level.OK] * 3
    assert findings[0].text == "TF_CONFIG: this is ps 0; 1 worker, 1 ps."
    assert findings[1].text == f"This machine can listen at {addresses[1]}."


@pytest.mark.parametrize(
    ("config", "text", "fix"),
    [
        ("{'cluster': {}}", "TF_CONFIG is not JSON", "json.dumps"),
        (cluster(["a", "b"]), "'a' is not of the form", "host0:2222"),
        (cluster(["a:1", "b:1"], 2), "index 2 is outside", "from 0"),
        (cluster(["a:1", "b:1"], kind="trainer"), "'trainer' is unknown", "type"),
        (cluster(["a:1", "a:1"]), "same address 'a:1'", "different ports"),
    ],
    ids=["no JSON", "no port", "no such task", "no such type", "one address twice"],
)
def test_mistake_in_tf_config_is_named(
    config: str, text: str, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TF_CONFIG", config)
    finding = next(clusters.examine_clusters())
    assert finding.level is Level.ERROR
    assert finding.text.startswith("TF_CONFIG")
    assert text in finding.text
    assert fix in finding.fix
    assert "\n" not in finding.fix


def test_port_that_is_taken_is_named(port: int) -> None:
    finding = clusters.check_own_address(f"127.0.0.1:{port}")
    assert finding.level is Level.ERROR
    assert f"Another program uses 127.0.0.1:{port}" in finding.text
    assert f"ss -ltnp 'sport = :{port}'" in finding.fix


def test_address_of_another_machine_is_no_own_address() -> None:
    finding = clusters.check_own_address("192.0.2.1:2222")
    assert finding.level is Level.ERROR
    assert "task type and index" in finding.fix


def test_host_without_address_is_named() -> None:
    address = "no-such-host.invalid:2222"
    own = clusters.check_own_address(address)
    for finding in (own, *clusters.check_peers({"worker 1": address})):
        assert finding.level is Level.ERROR
        assert "no-such-host.invalid, has no address" in finding.text


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (TimeoutError(), "no answer within 0.5 s."),
        (OSError(113, "No route to host"), "No route to host"),
    ],
)
def test_lost_hosts_are_named_and_many_are_counted(
    error: OSError, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(address: tuple[str, int], limit_s: float) -> None:
        raise error

    monkeypatch.setattr(socket, "create_connection", fail)
    lost = {f"worker {n}": "10.0.0.9:2222" for n in range(20)}
    findings = list(clusters.check_peers(lost, limit_s=0.5))
    assert len(findings) == 9
    assert findings[0].text.startswith("worker 0 at 10.0.0.9:2222 cannot be reached: ")
    assert words in findings[0].text
    assert findings[-1].text == "12 more tasks cannot be reached."


def test_second_cluster_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", cluster(["127.0.0.1:2222"]))
    make = ENVIRONMENTS["TF_CONFIG"]
    findings, resolver = clusters.examine_resolvers({"first": make, "second": make})
    assert resolver is not None
    assert findings[1].text.endswith("It is not used: an earlier one has a cluster.")


# Environment variables with mistakes, and scripts whose imports are out of order.


def _check(variables: dict[str, str], tmp_path: Path) -> list[Finding]:
    return list(check_settings(variables, tmp_path / "keras.json"))


def test_clean_environment_is_fine(tmp_path: Path) -> None:
    variables = {
        "KERAS_BACKEND": "jax",
        "STRATAGEM_PEER_TIMEOUT_S": "5",
        "STRATAGEM_RUN_DIR": "/runs/1",
        "STRATAGEM_WORKERS": "4",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": ".8",
        "NCCL_P2P_DISABLE": "0",
    }
    assert [one.level for one in _check(variables, tmp_path)] == [Level.OK]


@pytest.mark.parametrize(
    ("name", "value", "level", "text", "fix"),
    [
        ("KERAS_BACKEND", "torch", Level.ERROR, "KERAS_BACKEND=torch", "KERAS_BACKEND=jax"),
        (
            "STRATAGEM_PEER_TIMOUT_S",
            "5",
            Level.WARNING,
            "is not a setting",
            "write STRATAGEM_PEER_TIMEOUT_S",
        ),
        ("STRATAGEM_LOG_LEVEL", "loud", Level.ERROR, "not a log level", "Default: auto."),
        ("STRATAGEM_PEER_TIMEOUT_S", "soon", Level.ERROR, "not a time limit", "Default: 30.0"),
        ("XLA_PYTHON_CLIENT_PREALLOCATE", "no", Level.WARNING, "counts as true", "=false"),
        ("NCCL_P2P_DISABLE", "1", Level.WARNING, "through host memory", "unset"),
        ("JAX_DISABLE_JIT", "true", Level.WARNING, "nothing is compiled", "unset"),
        ("TF_FORCE_GPU_ALLOW_GROWTH", "true", Level.NOTE, "has no effect", ""),
    ],
)
def test_mistake_is_named_with_its_fix(
    name: str, value: str, level: Level, text: str, fix: str, tmp_path: Path
) -> None:
    (finding,) = _check({name: value}, tmp_path)
    assert finding.level is level
    assert text in finding.text
    assert fix in finding.fix


@pytest.mark.parametrize(
    ("variables", "config", "backend"),
    [
        ({"KERAS_BACKEND": "torch"}, '{"backend": "jax"}', "torch"),
        ({}, '{"backend": "jax"}', "jax"),
        ({"KERAS_BACKEND": ""}, None, "tensorflow"),
        ({}, "{", "tensorflow"),
    ],
)
def test_backend_of_keras_alone_is_that_of_its_rules(
    variables: dict[str, str], config: str | None, backend: str, tmp_path: Path
) -> None:
    if config is not None:
        (tmp_path / "keras.json").write_text(config)
    assert keras_backend(variables, tmp_path / "keras.json") == backend


@pytest.mark.parametrize(
    ("config", "num_notes"),
    [('{"backend": "tensorflow"}', 1), ('{"backend": "jax"}', 0), ("{", 0), ("[]", 0)],
)
def test_other_backend_in_the_configuration_of_keras_is_a_note(
    config: str, num_notes: int, tmp_path: Path
) -> None:
    (tmp_path / "keras.json").write_text(config)
    notes = [one for one in _check({}, tmp_path) if one.level is Level.NOTE]
    assert len(notes) == num_notes
    assert len([one for one in _check({"KERAS_BACKEND": "jax"}, tmp_path) if one.fix]) == 0


@pytest.mark.parametrize(
    ("script", "level", "text"),
    [
        ("import stratagem as sg\nimport keras\n", Level.OK, "with the jax backend"),
        ("import stratagem\nfrom tensorflow import keras\n", Level.ERROR, ":2 uses tf.keras"),
        ("import stratagem\nimport tensorflow.keras as k\n", Level.ERROR, ":2 uses tf.keras"),
        ("import stratagem\nimport tensorflow as tf\ntf.data\n", Level.OK, "jax"),
        ("import stratagem\ntf.keras.Model()\n", Level.ERROR, ":2 uses tf.keras"),
        ("import keras\nimport stratagem as sg\n", Level.ERROR, ":1 imports keras before"),
        ("from keras.layers import Dense\nimport stratagem\n", Level.ERROR, ":1 imports keras"),
        ("import keras\n", Level.NOTE, "does not import stratagem"),
        ("from .keras import a\nimport stratagem\nimport keras\n", Level.OK, "jax"),
        ("import = 1\n", Level.ERROR, ":1: invalid syntax"),
    ],
)
def test_order_of_imports_is_checked(script: str, level: Level, text: str, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(script)
    finding = check_script(path, "tensorflow")
    assert finding.level is level
    assert text in finding.text
    if "imports keras before" in text:
        assert check_script(path, "jax").level is Level.OK


# Packages that do not fit together are found from their metadata.

_REQUIRED = {
    "jax": ("jaxlib<=0.10.2,>=0.10.1", "numpy>=2.0", 'jaxlib==0.9 ; extra == "ci"'),
    "stratagem": ("keras<4,>=3.12", 'tomli ; python_version < "3.0"'),
}
_FITTING = {"jax": "0.10.2", "jaxlib": "0.10.2", "numpy": "2.4.6", "keras": "3.15.1"}


def _checked(required: dict[str, tuple[str, ...]], installed: dict[str, str]) -> list[Finding]:
    return list(check_versions({one: parsed(texts) for one, texts in required.items()}, installed))


def test_this_environment_fits_together() -> None:
    required, installed = requirements(), installed_versions()
    assert {"stratagem", "jax", "keras"} <= set(required)
    assert any("extra" in str(one.marker) for one in required["stratagem"])
    (finding,) = check_versions(required, installed)
    assert finding.level is Level.OK
    del required["keras"]
    assert [one.level for one in check_versions(required, {**installed, "jax": "0.1"})] != ["ok"]


def test_fitting_versions_are_listed() -> None:
    """A release candidate counts as its version; a requirement that cannot be read is left out."""
    required = {**_REQUIRED, "numpy": ("not a requirement !",)}
    (finding,) = _checked(required, {**_FITTING, "keras": "3.16.0rc1"})
    assert finding.level is Level.OK
    assert "jaxlib 0.10.2" in finding.text


@pytest.mark.parametrize(
    ("changed", "text", "fix"),
    [
        (
            {"jaxlib": "0.11.0"},
            "jaxlib 0.11.0 is installed, but jax requires jaxlib<=0.10.2,>=0.10.1.",
            'pip install "jaxlib<=0.10.2,>=0.10.1"',
        ),
        (
            {"keras": "4.0.0"},
            "keras 4.0.0 is installed, but stratagem requires keras<4,>=3.12.",
            'pip install "keras<4,>=3.12"',
        ),
    ],
    ids=["wrong jaxlib", "later major"],
)
def test_what_does_not_fit_is_named(changed: dict[str, str], text: str, fix: str) -> None:
    (finding,) = _checked(_REQUIRED, {**_FITTING, **changed})
    assert (finding.level, finding.text, finding.fix) == (Level.ERROR, text, fix)


def test_missing_package_is_named() -> None:
    (finding,) = _checked({"jax": ("no-such-package>=2.0",)}, {"jax": "0.10.2"})
    assert finding.text == "no-such-package is not installed, but jax requires it."
    assert finding.fix == 'pip install "no-such-package>=2.0"'


@pytest.mark.parametrize("name", ["jax-cuda12-plugin", "jax-cuda12-pjrt", "jax-cuda13-plugin"])
def test_plugin_of_another_jaxlib_is_an_error(name: str) -> None:
    assert _checked({}, {"jaxlib": "0.10.2", name: "0.10.2"})[0].level is Level.OK
    (finding,) = _checked({}, {"jaxlib": "0.10.2", name: "0.10.1"})
    assert finding.text.startswith(f"{name} 0.10.1 was built for another jaxlib than 0.10.2")
    assert finding.fix == f'pip install "{name}==0.10.2"'


def test_libtpu_of_another_jax_is_an_error() -> None:
    required = {"jax": ('libtpu==0.0.42.* ; extra == "tpu"',)}
    assert _checked(required, {"libtpu": "0.0.42.1"})[0].level is Level.OK
    (finding,) = _checked(required, {"libtpu": "0.0.40"})
    assert finding.level is Level.ERROR
    assert finding.text.startswith("libtpu 0.0.40 is installed, but jax requires libtpu==0.0.42.*")


def test_optional_package_outside_of_its_extra_is_a_warning() -> None:
    extras = ('ray[default]>=2.59 ; extra == "ray"', 'grain>=1 ; extra == "data"')
    assert _checked({"stratagem": extras}, {"ray": "2.60.0"})[0].level is Level.OK
    (finding,) = _checked({"stratagem": extras}, {"ray": "2.9.0"})
    assert finding.level is Level.WARNING
    assert finding.text == "ray 2.9.0 is installed, but stratagem[ray] requires ray>=2.59."
    assert finding.fix == 'pip install "ray>=2.59"'
    assert _checked({"keras": extras}, {"ray": "2.9.0"})[0].level is Level.OK


# A bug report says what matters, and no name, address or secret.


def test_report_has_versions_devices_settings_and_problems() -> None:
    found = [
        Finding("a", Level.OK, "fine"),
        Finding("a", Level.WARNING, "too small", "make it large"),
    ]
    variables = {"XLA_FLAGS": "--a=1|2", "EDITOR": "vi", "JAX_PLATFORMS": "cpu"}
    text = describe(facts({"jax": "0.10.2"}, ["2 x cpu"], found, variables))
    for line in ("| jax | 0.10.2 |", "| devices | 2 x cpu |", "| XLA_FLAGS | --a=1\\|2 |"):
        assert line in text.splitlines()
    assert text.endswith("- warning: too small")
    assert "EDITOR" not in text
    assert "fine" not in text


def test_values_for_json_are_redacted_alike() -> None:
    problem = Finding("a", Level.ERROR, f"no {Path.home()}/x at 10.1.2.3", "make it")
    variables = {"KERAS_BACKEND": "jax", "JAX_KEY": "s3cret", "XLA_FLAGS": f"--a={Path.home()}"}
    variables["RAY_AUTH_TOKEN"] = "s3cret"
    values = facts({"jax": "0.10.2"}, ["2 x H100 (gpu)"], [problem], variables)
    assert values["versions"] == {"jax": "0.10.2"}
    assert values["devices"] == ["2 x H100 (gpu)"]
    shown = {"JAX_KEY": "(set)", "KERAS_BACKEND": "jax", "RAY_AUTH_TOKEN": "(set)"}
    assert values["variables"] == {**shown, "XLA_FLAGS": "--a=~"}
    assert values["problems"] == [{"level": "error", "text": "no ~/x at ADDRESS"}]


def test_names_and_addresses_are_hidden() -> None:
    text = (
        f"{Path.home()}/train by {getpass.getuser()} on {socket.gethostname()}, "
        "10.1.2.3:2222, 127.0.0.1:1, jax 0.10.2.1"
    )
    hidden = redacted(text)
    assert str(Path.home()) not in hidden
    assert socket.gethostname() not in hidden
    assert "10.1.2.3" not in hidden
    assert "ADDRESS:2222, 127.0.0.1:1" in hidden


# Findings in a terminal: one heading a topic, a fix below each problem, the counts at the end.

_FINDINGS = [
    Finding("machine", Level.OK, "2 cores."),
    Finding("machine", Level.WARNING, "[small] /dev/shm.", "make it large."),
    Finding("cluster", Level.ERROR, "No host.", "add one."),
]


def test_text_has_headings_fixes_and_counts(capsys: pytest.CaptureFixture[str]) -> None:
    assert show(iter(_FINDINGS)) == _FINDINGS
    lines = [line.strip(" ✓!✗i-") for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "machine",
        "2 cores.",
        "[small] /dev/shm.",
        "Fix: make it large.",
        "cluster",
        "No host.",
        "Fix: add one.",
        "1 error, 1 warning",
    ]


def test_line_of_a_file_is_not_wrapped(capsys: pytest.CaptureFixture[str]) -> None:
    text = "A long finding. " * 20
    show([Finding("machine", Level.WARNING, text, "a fix. " * 30)])
    lines = capsys.readouterr().out.splitlines()
    assert [len(line) > 200 for line in lines] == [False, True, True, False]


def test_terminal_wraps_a_line_below_its_text(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "40")
    show([Finding("machine", Level.OK, "word " * 20)])
    lines = capsys.readouterr().out.splitlines()
    assert max(len(Text.from_ansi(line).plain.rstrip()) for line in lines) <= 40
    assert all(Text.from_ansi(line).plain.startswith("    word") for line in lines[2:-1])
