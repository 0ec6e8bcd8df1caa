"""Scripts that set environment variables, recognized by their text."""

from __future__ import annotations

import pytest

from stratagem.launch.plan.environment_writes import writes_environment


@pytest.mark.parametrize(
    "text",
    [
        "",
        "import os",
        "import os\nprint(os.environ['HOME'])",
        "import os\nprint(os.environ.get('HOME'), *os.environ.items())",
        "import os as system\nprint('HOME' in system.environ)",
        "from os import environ\nif 'A' not in environ: print(environ['B'].update)",
        "environment = {}\nenvironment['A'] = 'B'",
        "'''It reads os.environ.'''",
    ],
)
def test_script_that_reads(text) -> None:
    assert not writes_environment(text)


@pytest.mark.parametrize(
    "text",
    [
        "import os\nos.environ['A'] = 'B'",
        "import os\nos.environ['A'] += 'B'",
        "import os\ndel os.environ['A']",
        "import os\nos.environ.setdefault('A', 'B')",
        "import os\nos.environ.update(A='B')",
        "import os\nos.environ |= {'A': 'B'}",
        "import os\nfor os.environ['A'] in 'BC': pass",
        "import os\nvariables = os.environ\nvariables['A'] = 'B'",
        "import os\nchange(os.environ)",
        "import os\nos.putenv('A', 'B')",
        "from os import unsetenv",
        "from os import environ as variables\nvariables['A'] = 'B'",
        "import os\ngetattr(os, 'environ')['A'] = 'B'",
        "this is no Python",
        "print('\0')",
    ],
)
def test_script_that_sets_or_cannot_be_read(text) -> None:
    assert writes_environment(text)
