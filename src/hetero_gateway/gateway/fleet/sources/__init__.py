"""Where instances come from besides the configuration and /admin: a file, DNS, Kubernetes."""
