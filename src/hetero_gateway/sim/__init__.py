"""Virtual time: one instance's engine step; pure, seeded by its inputs, reads no clock."""
