"""What instances have in their prefix caches, as far as what they were sent shows."""
