"""Starts the processes of a job, and the evaluation after the training."""
