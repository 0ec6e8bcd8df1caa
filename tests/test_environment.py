"""Settings from environment variables, and changes to the environment."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path

import pytest

from stratagem import environment


def keras_on(backend: str) -> types.SimpleNamespace:
    return types.SimpleNamespace(config=types.SimpleNamespace(backend=lambda: backend))


def test_every_variable_is_named_after_the_library_and_explained() -> None:
    for setting, variable in environment.VARIABLES.items():
        assert variable.name == f"STRATAGEM_{setting.upper()}"
        assert variable.meaning.endswith(".")
        assert variable.parse(str(variable.default)) == variable.default


def test_every_variable_is_in_the_documentation() -> None:
    page = (Path(__file__).parents[1] / "docs" / "reference" / "environment.md").read_text()
    for variable in environment.VARIABLES.values():
        default = variable.default
        default = (default or "none") if isinstance(default, str) else int(default)
        assert f"| `{variable.name}` | `{default}` | {variable.meaning} |" in page


def test_setting_has_its_default_where_nothing_is_set(monkeypatch) -> None:
    for variable in environment.VARIABLES.values():
        monkeypatch.delenv(variable.name, raising=False)
    assert environment.read("run_eagerly") is False
    assert environment.read("program_cache_size") == 256


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *((text, True) for text in ("1", "true", "True", "YES", "on")),
        *((text, False) for text in ("0", "false", "No", "OFF", "")),
    ],
)
def test_truth_value_is_read_in_any_usual_form(monkeypatch, text, expected) -> None:
    monkeypatch.setenv("STRATAGEM_RUN_EAGERLY", text)
    assert environment.read("run_eagerly") is expected


@pytest.mark.parametrize("text", ["2", "maybe", " 1"])
def test_other_text_is_not_a_boolean(monkeypatch, text) -> None:
    monkeypatch.setenv("STRATAGEM_RUN_EAGERLY", text)
    with pytest.raises(
        ValueError,
        match=f"Environment variable STRATAGEM_RUN_EAGERLY: '{text}' is not a boolean",
    ):
        environment.read("run_eagerly")


@pytest.mark.parametrize(("text", "expected"), [("1", 1), ("1000", 1000)])
def test_count_is_read(monkeypatch, text, expected) -> None:
    monkeypatch.setenv("STRATAGEM_PROGRAM_CACHE_SIZE", text)
    assert environment.read("program_cache_size") == expected


@pytest.mark.parametrize("text", ["", "0", "-1", "2.5", "many"])
def test_other_text_is_not_a_count(monkeypatch, text) -> None:
    monkeypatch.setenv("STRATAGEM_PROGRAM_CACHE_SIZE", text)
    with pytest.raises(
        ValueError, match=rf"STRATAGEM_PROGRAM_CACHE_SIZE: '{text}' is not a count(?s:.)*at least 1"
    ):
        environment.read("program_cache_size")


@pytest.mark.parametrize("chosen", [None, ""])
def test_jax_is_selected_where_no_backend_is_chosen(monkeypatch, chosen) -> None:
    monkeypatch.delitem(sys.modules, "keras", raising=False)
    monkeypatch.setenv("KERAS_BACKEND", "")
    if chosen is None:
        monkeypatch.delenv("KERAS_BACKEND")
    environment.select_keras_backend()
    assert os.environ["KERAS_BACKEND"] == "jax"


def test_chosen_backend_is_left_alone(monkeypatch) -> None:
    monkeypatch.delitem(sys.modules, "keras", raising=False)
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    environment.select_keras_backend()
    assert os.environ["KERAS_BACKEND"] == "torch"


def test_keras_that_is_loaded_with_jax_is_fine(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "keras", keras_on("jax"))
    environment.select_keras_backend()
    environment.require_jax_backend("jax")


@pytest.mark.parametrize("backend", ["tensorflow", "torch"])
def test_keras_that_is_loaded_with_another_backend_is_refused(monkeypatch, backend) -> None:
    words = f"Keras runs on the '{backend}' backend(?s:.)*`import stratagem` before `import keras`"
    monkeypatch.setitem(sys.modules, "keras", keras_on(backend))
    with pytest.raises(ImportError, match=words):
        environment.select_keras_backend()
    with pytest.raises(ImportError, match=words):
        environment.require_jax_backend(backend)


def test_keras_that_is_being_loaded_is_left_alone(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "keras", types.ModuleType("keras"))
    environment.select_keras_backend()


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (None, 1),
        ("--xla_dump_to=here", 1),
        ("--xla_force_host_platform_device_count=8", 8),
        ("--xla_a=1 --xla_force_host_platform_device_count=2 --xla_b", 2),
        (" ".join(f"--xla_force_host_platform_device_count={n}" for n in (4, 16)), 16),
    ],
)
def test_cpu_devices_that_xla_flags_ask_for_are_counted(monkeypatch, flags, expected) -> None:
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    if flags is not None:
        monkeypatch.setenv("XLA_FLAGS", flags)
    assert environment.num_forced_cpu_devices() == expected


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (None, []),
        ("--xla_dump_to=here", []),
        ("--xla_a=1 --xla_disable_hlo_passes=first,second --xla_b", ["first", "second"]),
        ("--xla_disable_hlo_passes=first --xla_disable_hlo_passes=second", ["second"]),
    ],
)
def test_passes_that_xla_flags_disable_are_found(monkeypatch, flags, expected) -> None:
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    if flags is not None:
        monkeypatch.setenv("XLA_FLAGS", flags)
    assert environment.disabled_xla_passes() == expected


def test_thread_pool_has_four_threads_a_device(monkeypatch) -> None:
    monkeypatch.setenv("NPROC", "")
    monkeypatch.delenv("NPROC")
    environment.size_cpu_thread_pool(3)
    assert os.environ["NPROC"] == "12"


def test_thread_pool_that_the_user_has_sized_stays(monkeypatch) -> None:
    monkeypatch.setenv("NPROC", "5")
    environment.size_cpu_thread_pool(3)
    assert os.environ["NPROC"] == "5"


def test_choice_of_another_backend_is_refused_before_keras_is_loaded(monkeypatch) -> None:
    monkeypatch.delitem(sys.modules, "keras", raising=False)
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    with pytest.raises(ImportError, match=r"KERAS_BACKEND is 'torch'\.(?s:.)*unset KERAS_BACKEND"):
        environment.require_jax_choice()
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    environment.require_jax_choice()


@pytest.mark.parametrize(
    ("text", "expected"), [(None, None), ("", None), ("  ", None), (" a b ", "a b")]
)
def test_other_program_s_variable_is_looked_up(monkeypatch, text, expected) -> None:
    monkeypatch.delenv("SLURM_PROCID", raising=False)
    if text is not None:
        monkeypatch.setenv("SLURM_PROCID", text)
    assert environment.lookup("SLURM_PROCID") == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, None),
        ("", ()),
        ("0", ("0",)),
        ("2, 0,GPU-1f", ("2", "0", "GPU-1f")),
        # CUDA stops at the first that names no GPU.
        ("1,-1,2", ("1",)),
        ("-1", ()),
        ("NoDevFiles", ()),
    ],
)
def test_visible_gpus_are_those_that_cuda_would_use(monkeypatch, text, expected) -> None:
    monkeypatch.setattr(environment, "_assigned_gpus", {})
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if text is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", text)
    assert environment.visible_gpus() == expected


@pytest.mark.parametrize("before", [None, "4,5,6"])
def test_gpus_that_were_shown_are_left_out_of_account(monkeypatch, before) -> None:
    monkeypatch.setattr(environment, "_assigned_gpus", {})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    if before is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", before)
    all_gpus = environment.visible_gpus()
    for ids in (["5"], ["4", "6"]):
        environment.show_gpus(ids)
        assert os.environ["CUDA_VISIBLE_DEVICES"] == ",".join(ids)
        assert environment.visible_gpus() == all_gpus
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "9")
    assert environment.visible_gpus() == ("9",)
    environment.show_gpus(["1"])
    assert environment.visible_gpus() == ("9",)


@pytest.fixture
def noted(monkeypatch) -> None:
    monkeypatch.setattr(environment, "_recorded_settings", [])
    monkeypatch.setenv("JAX_ENABLE_X64", "0")
    environment.record_library_settings()


@pytest.mark.parametrize(("name", "text"), [("JAX_ENABLE_X64", "1"), ("KERAS_HOME", "/elsewhere")])
def test_setting_that_was_read_may_not_change(noted, monkeypatch, name, text) -> None:
    environment.require_unchanged_settings()
    monkeypatch.setenv(name, text)
    with pytest.raises(
        RuntimeError, match=f"The program sets {name} to '{text}', but the launcher loaded JAX"
    ):
        environment.require_unchanged_settings()


def test_what_is_read_later_may_change(noted, monkeypatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=x")
    environment.require_unchanged_settings()


def test_any_setting_may_change_where_nothing_was_noted(monkeypatch) -> None:
    monkeypatch.setattr(environment, "_recorded_settings", [])
    monkeypatch.setenv("JAX_ENABLE_X64", "1")
    environment.require_unchanged_settings()


def test_variables_are_replaced_as_a_whole() -> None:
    before = environment.snapshot()
    try:
        environment.replace({"ONLY": "this"})
        assert dict(os.environ) == {"ONLY": "this"}
    finally:
        environment.replace(before)
    assert dict(os.environ) == before
