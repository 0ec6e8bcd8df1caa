"""Migration: names of other libraries with their counterparts, and a tool that rewrites programs.

Importing it loads neither libcst nor JAX.
"""
