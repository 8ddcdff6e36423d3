"""Decides everything that the recipe left open, each decision with its reason."""
