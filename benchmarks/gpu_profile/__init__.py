"""Profiles of training steps on one GPU: the longest kernels, beside what they could take."""
