"""The state of each instance: what is outstanding, how far it has got, and how fast it is."""
