"""Templates of Kubernetes, KubeRay and Slurm job descriptions.

Importing it loads neither JAX nor Keras; Jinja is loaded on first use.
"""
