"""Who may ask, and how much: the client behind a request."""
