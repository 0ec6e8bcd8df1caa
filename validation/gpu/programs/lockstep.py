"""Joins the other processes as the strategy of the first argument, and trains."""

from __future__ import annotations

import json
import sys
import time

import stratagem as sg
from validation.gpu.models import train

begin_s = time.monotonic()
result = {}
try:
    kinds = {
        "lockstep": sg.MultiWorkerMirroredStrategy,
        "local": lambda: sg.LocalUpdateStrategy(sg.local_updates.DiLoCo(period=4)),
        "elastic": sg.ElasticStrategy,
    }
    strategy = kinds[sys.argv[1]]()
    result["strategy"] = repr(strategy)
    result["losses"] = train(strategy, "mlp").losses_of_fit
except Exception as error:  # noqa: BLE001 - the result
    result |= {"error": type(error).__name__, "message": str(error)}
result["time_s"] = time.monotonic() - begin_s
print("RESULT", json.dumps(result), flush=True)
