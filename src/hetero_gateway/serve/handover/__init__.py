"""``serve --takeover``: a gateway's sockets and what it knows, given to the one that follows it."""
