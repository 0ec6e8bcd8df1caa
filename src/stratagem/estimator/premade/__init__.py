"""Pre-made Estimators: baselines, linear models and deep networks over feature columns."""
