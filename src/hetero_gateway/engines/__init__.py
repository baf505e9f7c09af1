"""What is an engine's own: one module per engine, read by every part that talks to one."""
