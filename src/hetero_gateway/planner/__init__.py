"""What to deploy: estimates and rooflines for configurations not measured yet. Pure."""
