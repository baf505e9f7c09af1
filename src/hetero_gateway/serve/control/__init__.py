"""What a person sees and changes: admin, dashboard."""
