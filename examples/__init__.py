"""Uses of minippo, to take away."""
