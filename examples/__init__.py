"""To take away: each file is copied or run by itself."""
