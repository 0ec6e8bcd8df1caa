"""Heads: loss, predictions and metrics from logits."""

__all__ = []
