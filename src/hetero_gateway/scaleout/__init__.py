"""The gateway's scheduler, used from elsewhere: by workers, by other gateways, by Envoy."""
