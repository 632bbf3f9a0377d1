"""The default data set with its judge, and the rows of a data folder."""
