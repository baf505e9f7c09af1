"""What the gateway counts and remembers of requests and instances, and how metrics show it."""
