"""What a plan becomes: vLLM commands, scripts, containers, and the gateway's configuration."""
