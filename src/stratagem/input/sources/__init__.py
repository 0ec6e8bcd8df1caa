"""Sources of batches: one adapter for each kind of dataset."""
