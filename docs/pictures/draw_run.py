"""Draws `run.svg`: the terminal of README's script with two workers, as it really looks.

python docs/pictures/draw_run.py
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

HERE = Path(__file__).parent
README = HERE.parents[1] / "README.md"
COMMAND = "stratagem launch --workers 2 train.py"


def main() -> None:
    """Runs the script and draws its output beside this file."""
    (script,) = re.findall(r"```python\n(import stratagem.*?)```", README.read_text(), re.DOTALL)
    script = re.sub(r"sg\.MirroredStrategy\(.*", "sg.MultiWorkerMirroredStrategy()", script)
    script = script.replace("epochs=20, verbose=0", "epochs=5, verbose=2")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(script)
        launcher = Path(sys.executable).with_name("stratagem")
        shown = subprocess.run(
            [launcher, *COMMAND.split()[1:]],
            cwd=folder,
            env=os.environ | {"FORCE_COLOR": "1"},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=80, file=nowhere, force_terminal=True)
        console.print(f"[bold]$ {COMMAND}[/bold]")
        console.print(Text.from_ansi(shown.rstrip()))
        console.save_svg(str(HERE / "run.svg"), title="two workers on one machine")


if __name__ == "__main__":
    main()
