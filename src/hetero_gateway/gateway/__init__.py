"""The gateway's shell: sockets, clock, HTTP. It asks the core and acts."""
