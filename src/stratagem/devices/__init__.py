"""Devices of JAX: meshes, processes, all-reduce and its algorithms, compression."""
