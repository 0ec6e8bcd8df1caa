"""Heads: loss, predictions and metrics from logits."""
