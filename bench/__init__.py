"""What makes the numbers and plots of README.md and RESULTS.md; loop.svg and clip.svg are drawn by hand."""
