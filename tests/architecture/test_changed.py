"""The choice of tests of `make check`."""

from __future__ import annotations

from tests import changed


def test_module_brings_its_namesake_and_the_tests_that_import_it() -> None:
    found = changed.tests_of(["src/stratagem/devices/abstract_devices.py"])
    assert "tests/topology/test_abstract_devices.py" in found
    assert "tests/planning/test_placed_state.py" in found


def test_changed_test_is_run_itself() -> None:
    assert "tests/test_options.py" in changed.tests_of(["tests/test_options.py"])


def test_other_files_bring_no_tests() -> None:
    assert changed.tests_of(["README.md", "docs/guides/tpu.md"]) == []


def test_names_of_modules() -> None:
    assert changed.module_name("src/stratagem/values/__init__.py") == "stratagem.values"
    assert changed.module_name("tests/slow_rows.py") == "tests.slow_rows"


def test_imports_of_a_file() -> None:
    text = "import a.b\nfrom c import d\n"
    assert changed.imported_modules(text) == {"a.b", "c", "c.d"}
