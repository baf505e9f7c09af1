"""What is known of each instance: what is outstanding on it, how far it is, how fast it is."""
