"""What instances have in their prefix caches, inferred from what they were sent."""
