"""What a person sees and changes: admin, metrics, dashboard."""
