"""Model functions compiled into training, evaluation and prediction steps."""
