"""Trains: arguments, trainer, isolation probe, runtime check, metrics, faults. main.py is the way through."""
