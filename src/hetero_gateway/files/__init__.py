"""Readers and schemas of the files that people write, and the data that the package ships."""
