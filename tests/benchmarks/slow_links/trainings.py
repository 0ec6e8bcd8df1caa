"""Trainings made up for the tests."""

from __future__ import annotations

from benchmarks.slow_links.curves import Point, Training

__all__ = ["training"]


def training(
    method: str,
    losses: tuple[float, ...],
    step_s: float = 1.0,
    step_bytes: float = 1e6,
    task: str = "transformer",
) -> Training:
    """Returns a training whose losses were told every 10 steps."""
    points = tuple(
        Point(
            steps=10 * place,
            seconds=10 * place * step_s,
            num_bytes=int(10 * place * step_bytes),
            loss=loss + 0.1,
            validation_loss=loss,
        )
        for place, loss in enumerate(losses, 1)
    )
    links = ("10 Gbit/s", "100 Mbit/s")
    return Training(
        task=task,
        method=method,
        points=points,
        step_s=dict(zip(links, (step_s, 2 * step_s), strict=True)),
        step_bytes=dict.fromkeys(links, step_bytes),
    )
