"""Files of requests and of their answers, and what sends their lines."""
