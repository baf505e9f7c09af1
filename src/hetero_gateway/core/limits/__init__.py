"""How much a client may do: windows of a minute, what a request is charged, and what that cost."""
