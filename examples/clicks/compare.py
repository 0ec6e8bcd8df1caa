"""Trains the same model on one device, by one worker, and by workers that wait for nobody.

    python -m examples.clicks.compare --workers 4

The table is small enough for one process. One worker makes the updates of one device; several make
the same ones of values that are some updates old. Ends with exit code 1 if the held-out AUC of any
two differ by more than `--within`.
"""

import argparse
import json
import sys
from pathlib import Path

import stratagem as sg  # isort: skip - before keras, because it selects the JAX backend
import keras

from examples.clicks import loops, models
from examples.clicks.law import NUM_FIELDS, NUM_NUMBERS, ClickLaw
from examples.clicks.picture import draw_staleness


def main():
    options = parse_options()
    law = ClickLaw(options.num_ids, options.seed)
    reached = {"one device": auc_under(sg.OneDeviceStrategy("cpu:0"), law, options)}
    counts = {}
    for num_workers in (1, options.workers):
        name = "one worker" if num_workers == 1 else f"{num_workers} workers"
        with sg.ParameterServerStrategy(num_workers=num_workers, num_servers=2) as strategy:
            reached[name] = auc_under(strategy, law, options)
            counts[name] = sg.coordinator.ClusterCoordinator(strategy).staleness()
    apart = max(reached.values()) - min(reached.values())
    results = {"auc": reached, "best_auc": law.best_auc(options.num_held_out), "staleness": counts}
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    title = f"{options.model} model, {options.workers} workers, 2 servers, batches of "
    draw_staleness(
        options.output / "staleness.png",
        counts[f"{options.workers} workers"],
        title + str(options.batch_size),
    )
    for name, auc in reached.items():
        late = f"; updates late: {counts[name]}" if name in counts else ""
        print(f"{name:12} held-out AUC {auc:.4f}{late}")
    print(f"{apart:.4f} apart; of the true probabilities {results['best_auc']:.4f}")
    if apart > options.within:
        sys.exit(f"Failed: the AUCs are {apart:.4f} apart, more than {options.within}")


def auc_under(strategy, law, options):
    """Trains the model under a strategy, and returns its AUC on held-out examples."""
    keras.utils.set_random_seed(options.seed)
    with strategy.scope():
        model = models.build(options.model, law.num_ids, NUM_FIELDS, NUM_NUMBERS, width=16)
        loops.compile_model(model, models.LEARNING_RATES[options.model])
    num_steps = options.num_examples // options.batch_size
    loops.train_by_fit(model, law, num_steps=num_steps, batch_size=options.batch_size)
    return loops.evaluate(model, law, options.num_held_out, batch_size=options.batch_size)


def parse_options():
    parser = argparse.ArgumentParser(
        prog="python -m examples.clicks.compare",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--model", choices=models.MODELS, default="factorisation")
    add("--num-ids", type=int, default=100_000, help="rows of the table")
    add("--workers", type=int, default=4, help="that wait for nobody")
    add("--num-examples", type=int, default=600_000, help="to train on")
    add("--num-held-out", type=int, default=100_000)
    add("--batch-size", type=int, default=1024)
    add("--within", type=float, default=0.01, help="how far apart the AUCs may be")
    add("--seed", type=int, default=0)
    add("--output", type=Path, default=Path("runs", "clicks", "compare"), help="of the results")
    options = parser.parse_args()
    if options.workers < 2:
        parser.error(f"--workers {options.workers}: at least 2 are compared with one")
    return options


if __name__ == "__main__":
    main()
