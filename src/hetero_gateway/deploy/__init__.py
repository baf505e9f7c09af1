"""The files that a plan becomes: vLLM commands, scripts, containers, the gateway's
configuration."""
