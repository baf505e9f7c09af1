"""hetero-gateway: a load-balancing gateway for unequal vLLM instances."""

__version__ = "0.3.0"
