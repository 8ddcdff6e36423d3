"""Reads and validates the recipe, one YAML file. Imports no torch."""
