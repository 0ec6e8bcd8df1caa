"""Training with evaluation: specs, cluster roles, exporters and early stopping."""
