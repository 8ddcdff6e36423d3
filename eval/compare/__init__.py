"""Compares base and tuned: settings, statistics, verdicts, contamination, gate."""
