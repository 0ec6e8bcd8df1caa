"""The sides of the comparisons: each module is one program that trains when it is asked to."""
