"""When lines of batches are sent, and when they will be done: what decides, pure."""
