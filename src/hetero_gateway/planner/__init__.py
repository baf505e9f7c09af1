"""What to deploy: estimates and rooflines for configurations that nobody has measured yet. Pure."""
