"""Whatever makes a number or a picture of README.md and RESULTS.md."""
