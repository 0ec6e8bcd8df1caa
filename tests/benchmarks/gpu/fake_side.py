"""A side that writes figures, and then ends, fails or hangs. Imports only the options."""

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
    figures = {"stage": "done" if behavior == "ends" else "first step", "first_loss": 2.5}
    figures |= {"steps_per_call": options.steps_per_call, "num_rounds": options.num_rounds}
    figures["cache"] = os.environ["JAX_COMPILATION_CACHE_DIR"]
    Path(options.result).write_text(json.dumps(figures), encoding="utf-8")
    if behavior == "fails":
        sys.exit("the reason of the failure")
    if behavior == "hangs":
        time.sleep(600)


if __name__ == "__main__":
    _main()
