"""A request's way through the gateway: read, placed, relayed, recorded."""
