"""What clients have used, kept beyond a process."""
