"""Sources of instances besides the configuration and /admin: a file, DNS, Kubernetes."""
