"""Measures models with lm-evaluation-harness."""
