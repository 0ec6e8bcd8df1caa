"""Trains a model of clicks whose table no process of the run has room for, to a stated AUC.

    python -m examples.clicks --model factorisation --loop fit
    python -m examples.clicks --model wide_and_deep --loop coordinator

Every process, this one included, may have less memory than the table has; the kernel sees to it
(`examples/clicks/memory.py`). Ends with exit code 1 if the AUC is not reached, or if the limit was
not in force.
"""

import argparse
import json
import sys
import time
from pathlib import Path

from examples.clicks.law import NUM_FIELDS, NUM_NUMBERS, ClickLaw
from examples.clicks.memory import can_make, limit_memory, used_by_all

_GB = 1e9


def main():
    options = parse_options()
    limit_bytes = int(options.limit_gb * _GB)
    limit_memory(limit_bytes)  # before anything is loaded that starts threads
    if can_make(options.num_ids, options.width):
        sys.exit(f"Failed: one process can make the whole table under {options.limit_gb} GB")
    failures = []
    results = train(options)
    for one in results["used"]:
        if one["limit_bytes"] != limit_bytes:
            failures.append(f"{one['process']} runs under a limit of {one['limit_bytes']} bytes")
    if results["auc"] < options.auc:
        failures.append(f"the AUC is {results['auc']:.4f}, not {options.auc}")
    report(options, results)
    if failures:
        sys.exit("Failed: " + "; ".join(failures))


def train(options):
    """Trains, and returns all figures."""
    # Not above: the limit comes first.
    import stratagem as sg  # isort: skip - before keras, because it selects the JAX backend
    import keras

    from examples.clicks import loops, models
    from examples.clicks.picture import draw_staleness

    law = ClickLaw(options.num_ids, options.seed)
    num_steps = options.num_examples // options.batch_size
    size = {"num_steps": num_steps, "batch_size": options.batch_size}
    start_s = time.perf_counter()
    with sg.ParameterServerStrategy(
        num_workers=options.workers,
        num_servers=options.servers,
        variable_partitioner=sg.partitioners.FixedShardsPartitioner(options.servers),
    ) as strategy:
        keras.utils.set_random_seed(options.seed)
        with loops.CONSOLE.status("making the table on the servers"), strategy.scope():
            model = models.build(
                options.model, options.num_ids, NUM_FIELDS, NUM_NUMBERS, width=options.width
            )
            loops.compile_model(model, models.LEARNING_RATES[options.model])
        made_s = time.perf_counter()
        if options.loop == "fit":
            loops.train_by_fit(model, law, **size, num_epochs=options.epochs)
        else:
            loops.train_by_coordinator(model, law, **size)
        trained_s = time.perf_counter()
        auc = loops.evaluate(model, law, options.num_held_out, batch_size=options.batch_size)
        counts = sg.coordinator.ClusterCoordinator(strategy).staleness()
        used = used_by_all(strategy)
    draw_staleness(
        folder_of(options) / "staleness.png",
        counts,
        f"{options.model} by {options.loop}, {options.workers} workers, {options.servers} servers",
    )
    return {
        "auc": auc,
        "best_auc": law.best_auc(options.num_held_out),
        "examples_per_s": num_steps * options.batch_size / (trained_s - made_s),
        "making_s": made_s - start_s,
        "training_s": trained_s - made_s,
        "whole_s": time.perf_counter() - start_s,
        "used": [vars(one) for one in used],
        "staleness": counts,
    }


def folder_of(options):
    """Returns where results are written."""
    return options.output or Path("runs", "clicks", f"{options.model}-{options.loop}")


def report(options, results):
    """Prints the figures, and writes them to a file."""
    folder = folder_of(options)
    told = {"options": vars(options), **results}
    (folder / "results.json").write_text(json.dumps(told, indent=2, default=str) + "\n")
    table_gb = options.num_ids * options.width * 4 / _GB
    print(f"Table: {options.num_ids:,} rows, {table_gb:.2f} GB; as much again for its slots")
    for one in results["used"]:
        print(f"  {one['process']:12} at most {one['peak_bytes'] / _GB:.2f} GB resident")
    print(
        f"Limit of each process: {options.limit_gb} GB\n"
        f"{results['examples_per_s']:,.0f} examples/s, the first steps included; the table was "
        f"made in {results['making_s']:.0f} s, training took {results['training_s']:.0f} s, "
        f"all {results['whole_s']:.0f} s\n"
        f"Updates that gradients were late: {results['staleness']}\n"
        f"Figures and a picture of that: {folder}\n"
        f"Held-out AUC: {results['auc']:.4f}; asked for {options.auc}; of the true probabilities "
        f"{results['best_auc']:.4f}"
    )


def parse_options():
    parser = argparse.ArgumentParser(
        prog="python -m examples.clicks", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--model", choices=["factorisation", "wide_and_deep"], default="factorisation")
    add("--loop", choices=["fit", "coordinator"], default="fit")
    add("--num-ids", type=int, default=25_000_000, help="rows of the table")
    add("--width", type=int, default=32, help="columns of the table")
    add("--workers", type=int, default=2)
    add("--servers", type=int, default=3)
    add("--limit-gb", type=float, default=3.15, help="memory of each process, in 10^9 bytes")
    add("--num-examples", type=int, default=4_096_000, help="to train on")
    add("--num-held-out", type=int, default=100_000)
    add("--batch-size", type=int, default=2048)
    add("--epochs", type=int, default=5, help="of fit, which tells of each")
    add("--auc", type=float, default=0.81, help="which is to be reached")
    add("--seed", type=int, default=0)
    add("--output", type=Path, help="folder of the results; runs/clicks/MODEL-LOOP if not given")
    return parser.parse_args()


if __name__ == "__main__":
    main()
