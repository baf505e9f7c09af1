"""Readers and schemas of the files that people write, and the package's data files."""
