"""Trains the same model by Keras alone and with keyed tables on servers, from several seeds.

    python -m examples.recommenders.compare dlrm

Keras alone has a table with a vocabulary, which fits in one process. One worker and two servers
have tables keyed by 64-bit ids. Initial rows come from different generators, so the AUCs agree
within their spread over seeds. Exits with 1 if the mean AUCs differ by more than three of the
standard errors of their difference.
"""

import argparse
import json
import sys
from pathlib import Path

import stratagem as sg  # isort: skip - before keras, because it selects the JAX backend
import keras
import numpy as np
from matplotlib.figure import Figure

from examples.recommenders.ranking import MODELS
from examples.recommenders.tables import Tables
from examples.recommenders.tasks import Clicks

_SIDES = ("Keras alone", "keyed tables")
_COLORS = ("#c8553d", "#2a78b8")
_NUM_HELD_OUT = 50_000


def main():
    options = parse_options()
    found = {side: [train(side, seed, options) for seed in range(options.seeds)] for side in _SIDES}
    aucs = {side: np.array([auc for _, auc in runs]) for side, runs in found.items()}
    means = [aucs[side].mean() for side in _SIDES]
    spread = np.sqrt(sum(aucs[side].var(ddof=1) / options.seeds for side in _SIDES))
    options.output.mkdir(parents=True, exist_ok=True)
    results = {
        side: [{"losses": losses, "auc": auc} for losses, auc in found[side]] for side in _SIDES
    }
    (options.output / f"{options.model}.json").write_text(json.dumps(results, indent=1) + "\n")
    draw(found, options)
    for side in _SIDES:
        print(f"{side:13} held-out AUC {aucs[side].mean():.4f}, {np.round(aucs[side], 4).tolist()}")
    print(f"{means[1] - means[0]:+.4f} apart; standard error {spread:.4f}")
    if abs(means[1] - means[0]) > 3 * spread:
        sys.exit("Failed: the AUCs differ by more than their error.")


def train(side, seed, options):
    """Returns the losses of parts of the training, and the AUC on held-out examples."""
    task = Clicks(options.model, options.num_ids)
    tables = Tables("keyed" if side == "keyed tables" else "vocabulary", 16)
    keras.utils.set_random_seed(seed)
    if not tables.is_keyed:
        return fit(task, task.build(tables), tables, options)
    with sg.ParameterServerStrategy(num_workers=1, num_servers=2) as strategy:
        with strategy.scope():
            model = task.build(tables)
        return fit(task, model, tables, options)


def fit(task, model, tables, options):
    """Returns the losses of parts of the training, and the AUC on held-out examples."""
    history = model.fit(
        task.batches(tables, options.batch_size),
        steps_per_epoch=options.steps // options.parts,
        epochs=options.parts,
        verbose=0,
    ).history
    auc, _ = task.quality(model, tables, _NUM_HELD_OUT, 0)
    return history["loss"], float(auc)


def draw(found, options):
    """Draws the losses of both sides."""
    figure = Figure(figsize=(7, 3.8), layout="constrained")
    axes = figure.subplots()
    steps = options.steps // options.parts * np.arange(1, options.parts + 1)
    for side, color in zip(_SIDES, _COLORS, strict=True):
        for place, (losses, _) in enumerate(found[side]):
            label = side if place == 0 else None
            axes.plot(steps, losses, color=color, alpha=0.8, linewidth=1.2, label=label)
    axes.set_xlabel(f"steps of {options.batch_size:,} examples")
    axes.set_ylabel("training loss")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{options.model}, {options.seeds} seeds each", fontsize=11)
    figure.savefig(options.output / f"{options.model}.png", dpi=150)


def parse_options():
    parser = argparse.ArgumentParser(
        prog="python -m examples.recommenders.compare",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("model", choices=MODELS)
    add("--num-ids", type=int, default=100_000, help="rows of the table with a vocabulary")
    add("--steps", type=int, default=1_000)
    add("--parts", type=int, default=20, help="of the training, whose losses are shown")
    add("--batch-size", type=int, default=1_024, help="examples of a step")
    add("--seeds", type=int, default=4)
    add("--output", type=Path, default=Path("runs", "recommenders"), help="of the results")
    options = parser.parse_args()
    if options.seeds < 2:
        parser.error(f"--seeds {options.seeds}: at least 2 show a spread")
    return options


if __name__ == "__main__":
    main()
