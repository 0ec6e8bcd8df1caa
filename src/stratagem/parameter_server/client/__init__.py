"""Client of one process for the variables on parameter servers."""
