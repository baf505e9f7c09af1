"""What gateways in front of the same instances tell each other, and how they use it."""
