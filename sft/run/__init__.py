"""The run directory, its record, and comparing two runs."""
