"""Command: `python -m benchmarks.gpu --output DIR [--only NAMES] [--budget-s N] [--smoke]`."""

from __future__ import annotations

import argparse
import functools
from pathlib import Path

from benchmarks.gpu.runner import Plan, run_sides
from benchmarks.gpu.sides import select

_BYTES = {False: 10_000_000_000, True: 10_000_000}


def main() -> None:
    """Runs sides and writes their results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="folder of the results")
    parser.add_argument("--only", default="", help="workloads or keys of sides, or cold; commas")
    parser.add_argument("--budget-s", type=float, default=300.0, help="seconds of all sides")
    parser.add_argument("--cache", type=Path, help="compiled programs; OUTPUT/cache by default")
    parser.add_argument("--smoke", action="store_true", help="an epoch at most, several at once")
    parser.add_argument("--tiny", action="store_true", help="small sizes, on the CPU")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each side")
    parser.add_argument("--round-s", type=float, default=2.0, help="seconds of a round")
    parser.add_argument("--at-once", type=int, help="sides at the same time; 1, or 8 with --smoke")
    parser.add_argument("--resume", action="store_true", help="measures only what OUTPUT lacks")
    parser.add_argument("--profile", action="store_true", help="of our sides, after the rounds")
    parser.add_argument("--gated", action="store_true", help="one trains while the next prepares")
    parser.add_argument("--device-gb", type=float, default=72.0, help="for sides at the same time")
    parser.add_argument("--side-limit-s", type=float, default=150.0, help="seconds of a side")
    parser.add_argument("--platform", choices=("cpu", "gpu"), help="cpu with --tiny, else gpu")
    arguments = parser.parse_args()
    sides = select([name for name in arguments.only.split(",") if name])
    plan = Plan(
        folder=arguments.output,
        budget_s=arguments.budget_s,
        at_once=arguments.at_once or (8 if arguments.smoke else 2 if arguments.gated else 1),
        num_rounds=0 if arguments.smoke else arguments.rounds,
        round_s=0.2 if arguments.tiny else arguments.round_s,
        platform=arguments.platform or ("cpu" if arguments.tiny else "gpu"),
        is_tiny=arguments.tiny,
        side_limit_s=arguments.side_limit_s,
        device_gb=arguments.device_gb,
        is_gated=arguments.gated,
        profiles=arguments.profile,
        resumes=arguments.resume,
        state_bytes=_BYTES[arguments.tiny],
        cache=arguments.cache or arguments.output / "cache",
    )
    run_sides(sides, plan, functools.partial(print, flush=True))


if __name__ == "__main__":
    main()
