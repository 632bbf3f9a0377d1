"""The default data and its judge, the row format, converters, files."""
