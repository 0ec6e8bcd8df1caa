"""Ways to write a loss, with the replicas of several processes, beside plain Keras in each."""

from __future__ import annotations

import stratagem as sg  # isort: skip - before jax, because it readies the collectives

from tests.parity.comparison import carried_out, differences
from tests.parity.test_ways_of_losses import ROWS, expected_of, job_of

strategy = sg.MultiWorkerMirroredStrategy()
TRIED = (
    ("compile", "uneven"),
    ("train_step", "uneven"),
    ("stateless train_step", "even"),
    ("compute_loss", "uneven"),
    ("train_step, sums", "even"),
)
for entry, rows in TRIED:
    measured = carried_out(job_of(entry, *ROWS[rows]), strategy.scope)
    wrong = differences(measured, expected_of(entry, "", rows))
    assert not wrong, (entry, wrong)
print("equal", strategy.num_replicas_in_sync)
