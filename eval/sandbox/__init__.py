"""Runs generated code where it can do no harm. The part that runs inside imports the standard library only."""
