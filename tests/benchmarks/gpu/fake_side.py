"""A side that writes figures, then ends, fails, hangs or waits. Imports only the options."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from benchmarks.gpu.options import SideOptions


def _main() -> None:
    options = SideOptions.from_command_line()
    behavior = os.environ["FAKE_BEHAVIOR"]
    is_done = behavior in ("ends", "waits")
    figures = {"stage": "done" if is_done else "first step", "first_loss": 2.5}
    figures |= {"steps_per_call": options.steps_per_call, "num_rounds": options.num_rounds}
    figures["cache"] = os.environ["JAX_COMPILATION_CACHE_DIR"]
    Path(options.result).write_text(json.dumps(figures), encoding="utf-8")
    if behavior == "fails":
        sys.exit("the reason of the failure")
    if behavior == "hangs":
        time.sleep(600)
    if behavior == "waits":
        folder = Path(options.folder)
        (folder / f"{os.getpid()}.waits").touch()
        while len(list(folder.glob("*.waits"))) % 2:
            time.sleep(0.01)


if __name__ == "__main__":
    _main()
