"""What the scatter methods do to rows, as NumPy does it."""

from __future__ import annotations

from typing import Any

import numpy as np

CHANGES: list[tuple[str, Any]] = [
    ("scatter_add", lambda now, rows: now + rows),
    ("scatter_sub", lambda now, rows: now - rows),
    ("scatter_mul", lambda now, rows: now * rows),
    ("scatter_div", lambda now, rows: now / rows),
    ("scatter_min", np.minimum),
    ("scatter_max", np.maximum),
    ("scatter_update", lambda now, rows: rows),
]
