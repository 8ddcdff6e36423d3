"""Writes, verifies, resumes and reshards checkpoints, and writes the final model."""
