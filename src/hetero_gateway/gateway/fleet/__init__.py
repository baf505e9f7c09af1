"""The gateway's instances: configuration, connections, health."""
