"""Training loops, batches, summaries and sessions of an Estimator."""
