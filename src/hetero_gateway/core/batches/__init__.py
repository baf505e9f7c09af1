"""Decides when lines of batches are sent, and predicts when batches finish. Pure."""
