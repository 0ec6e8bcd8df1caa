"""A chief and a worker train on the GPU, each by itself, with the same parameter servers."""

from __future__ import annotations

import json
import os
import sys

import stratagem as sg
from validation.gpu.checks import device
from validation.gpu.models import digits, train

# isort: split
import jax
import numpy as np

with sg.ParameterServerStrategy(independent=True) as strategy:
    task = json.loads(os.environ["TF_CONFIG"])["task"]
    if task["type"] not in ("ps", "evaluator"):
        model = train(strategy, "table", epochs=3)
        x, y = digits("table")
        evaluated = model.evaluate(x, y, batch_size=32, verbose=0)[0]
        made = {
            "task": task,
            "losses": model.losses_of_fit,
            "evaluate": evaluated,
            "devices": [str(one) for one in jax.devices()],
            "wanted": device(),
            "finite": bool(np.isfinite(evaluated)),
        }
        print("RESULT", json.dumps(made), flush=True)
sys.stdout.flush()
