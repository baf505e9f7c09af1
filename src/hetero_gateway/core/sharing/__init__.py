"""What gateways in front of the same instances say to each other, and what they make of it."""
