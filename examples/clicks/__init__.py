"""Models of clicks with a table of 25 million rows, on parameter servers."""
