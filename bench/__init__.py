"""Makes the table of RESULTS.md."""
