"""Estimates of prompt and answer lengths, learnt from finished requests."""
