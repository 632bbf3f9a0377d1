"""The default data set: `zoo.py` makes it and judges answers to it."""
