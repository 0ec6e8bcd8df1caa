"""Views of a run: the live terminal view, the HTML report and exports. Does not import JAX."""
