"""JAX's persistent compilation cache, in processes of their own: a setting lasts as long as JAX."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from stratagem.resources import programs_folder

_PROGRAM = """
import jax, jax.monitoring, stratagem as sg
hits = []
jax.monitoring.register_event_listener(lambda name, **_: hits.append(name))
strategy = sg.OneDeviceStrategy("cpu:0")
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
total = strategy.run(lambda x: (x * 2).sum(), args=(jax.numpy.arange(8.0),))
print(total, jax.config.jax_compilation_cache_dir, hits.count("/jax/compilation_cache/cache_hits"))
"""


def _run(folder, program=_PROGRAM, expected_code=0, **variables):
    unset = ("JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS")
    shell = {name: text for name, text in os.environ.items() if name not in unset}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**shell, "STRATAGEM_CACHE_DIR": str(folder), "JAX_PLATFORMS": "cpu", **variables},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == expected_code, done.stderr
    return done.stdout.split(), done.stderr


def test_a_second_process_loads_what_the_first_compiled(tmp_path) -> None:
    (total, folder, num_hits), log = _run(tmp_path, STRATAGEM_LOG_LEVEL="INFO")
    assert (total, folder, num_hits) == ("56.0", str(programs_folder(tmp_path)), "0")
    assert f"cached in {folder}" in log
    assert os.stat(folder).st_mode & 0o077 == 0
    (total, _, num_hits), log = _run(tmp_path, STRATAGEM_LOG_LEVEL="INFO")
    assert total == "56.0"
    assert int(num_hits) > 0
    assert "cached in" not in log  # told once


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"STRATAGEM_COMPILATION_CACHE_BYTES": "0"}, "None"),
        ({"JAX_ENABLE_COMPILATION_CACHE": "0"}, "None"),
        ({"JAX_COMPILATION_CACHE_DIR": "/tmp/of_the_user"}, "/tmp/of_the_user"),
    ],
)
def test_the_choice_of_the_user_comes_first(tmp_path, variables, folder) -> None:
    (_, found, _), _ = _run(tmp_path, **variables)
    assert found == folder
    assert not (tmp_path / "programs").exists()


@pytest.mark.slow
def test_a_folder_that_others_can_write_is_not_used(tmp_path) -> None:
    folder = programs_folder(tmp_path)
    folder.mkdir(parents=True)
    folder.chmod(0o770)
    (_, found, _), log = _run(tmp_path)
    assert found == "None"
    assert f"chmod 700 {folder}" in log
    assert not list(folder.iterdir())


@pytest.mark.slow
def test_a_folder_that_cannot_be_made_is_no_error(tmp_path) -> None:
    (tmp_path / "programs").write_text("a file is in its place")
    (total, found, _), _ = _run(tmp_path)
    assert (total, found) == ("56.0", "None")


@pytest.mark.slow
def test_programs_used_least_recently_are_removed(tmp_path) -> None:
    folder = programs_folder(tmp_path)
    elsewhere = folder.parent / "another_cpu"
    elsewhere.mkdir(parents=True)
    folder.mkdir(mode=0o700)
    now = time.time()
    files = {"old": (elsewhere, 300), "older": (folder, 400), "new": (folder, 10)}
    for name, (parent, age_s) in files.items():
        path = parent / f"{name}-cache"
        path.write_bytes(bytes(1000))
        os.utime(path, (now - age_s, now - age_s))
    program = "import stratagem as sg; sg.OneDeviceStrategy('cpu:0')"
    _run(tmp_path, program, STRATAGEM_COMPILATION_CACHE_BYTES="2500")
    assert {path.name for path in folder.parent.rglob("*-cache")} == {"old-cache", "new-cache"}
    _run(tmp_path, program, STRATAGEM_COMPILATION_CACHE_BYTES="1500")
    assert {path.name for path in folder.parent.rglob("*-cache")} == {"new-cache"}


@pytest.mark.slow
def test_a_disk_that_is_full_leaves_no_file(tmp_path) -> None:
    program = """
import os, resource, signal, stratagem as sg
from jax._src.lru_cache import LRUCache
sg.OneDeviceStrategy("cpu:0")
cache = LRUCache(os.environ["FOLDER"], max_size=-1)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    cache.put("key", bytes(5000))
except OSError as error:
    print(error.strerror.replace(" ", "_"))
print(os.listdir(os.environ["FOLDER"]))
"""
    printed, _ = _run(tmp_path, program, FOLDER=str(tmp_path / "entries"))
    assert printed == ["File_too_large", "[]"]


@pytest.mark.slow
def test_a_process_killed_while_it_writes_leaves_no_part_of_an_entry(tmp_path) -> None:
    program = """
import os, signal, stratagem as sg
from jax._src.lru_cache import LRUCache
sg.OneDeviceStrategy("cpu:0")
cache = LRUCache(os.environ["FOLDER"], max_size=-1)
replace, os.replace = os.replace, lambda *_: os.kill(os.getpid(), signal.SIGKILL)
cache.put("key", bytes(5000))
"""
    folder = tmp_path / "entries"
    _run(tmp_path, program, expected_code=-signal.SIGKILL, FOLDER=str(folder))
    assert not (folder / "key-cache").exists()
