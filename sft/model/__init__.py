"""Loads the model: attention, kernels, adapters, new tokens."""
