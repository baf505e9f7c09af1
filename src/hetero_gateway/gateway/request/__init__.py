"""What a request's body says: the few fields that placing it needs, and how long its prompt is."""
