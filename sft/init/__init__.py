"""Write a first recipe from a data file: `sft init DATA`. main.py is the way through."""
