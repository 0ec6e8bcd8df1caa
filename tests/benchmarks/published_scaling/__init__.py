"""Published figures beside predictions: the file, the formulas by hand, and the report."""
