"""The instances as the gateway holds them: configuration, connections, health."""
