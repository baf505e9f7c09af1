"""``serve --takeover``: a gateway's sockets and state, handed to its successor."""
