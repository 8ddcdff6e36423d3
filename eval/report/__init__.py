"""Writes report.md and report.html from what the run's folder holds."""
