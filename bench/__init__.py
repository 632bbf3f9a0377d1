"""Makes the tables of RESULTS.md: run.py trains and evaluates, fill.py writes the tables."""
