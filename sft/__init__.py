"""Supervised fine-tuning from one recipe: see README.md, and train.py for the way through."""
