"""Tables and pages of the results of simulate and plan."""
