"""The default data and what is known of its truth, the row format, converters, files."""
