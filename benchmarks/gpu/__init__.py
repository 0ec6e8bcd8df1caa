"""The project beside its peers on one GPU: speed, first step, compilation, memory, checkpoints."""
