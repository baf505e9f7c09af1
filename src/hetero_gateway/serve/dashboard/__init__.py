"""What the dashboard shows, and its page."""
