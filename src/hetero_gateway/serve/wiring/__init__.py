"""The running parts of a gateway, wired together, and how they take up a changed file."""
