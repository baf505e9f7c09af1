"""Several gateways in front of the same instances: they see each other's load through a store."""
