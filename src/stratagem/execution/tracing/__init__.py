"""Tracing of replica functions into jaxprs of one replica."""
