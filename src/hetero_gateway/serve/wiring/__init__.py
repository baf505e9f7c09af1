"""The running parts of a gateway, wired together, and how they apply a changed file."""
