"""What is read from the environment, and changes to it."""

from __future__ import annotations

import os
import sys
import types

import pytest

from stratagem import environment


def keras_on(backend: str) -> types.SimpleNamespace:
    return types.SimpleNamespace(config=types.SimpleNamespace(backend=lambda: backend))


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
    assert environment.get("SLURM_PROCID") == text


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
