"""Converts the training configs of other tools to recipes, and accounts for every key of theirs. Imports no torch."""
