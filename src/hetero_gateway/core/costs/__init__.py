"""What a machine costs: profiles, the paper's equations, and the fitting of their constants."""
