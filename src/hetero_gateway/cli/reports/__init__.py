"""Tables and pages of what simulate and plan found."""
