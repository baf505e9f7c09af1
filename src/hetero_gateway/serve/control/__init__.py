"""What operators see and change: admin, dashboard."""
