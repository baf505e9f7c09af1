"""Measures a live instance and writes its profile."""
