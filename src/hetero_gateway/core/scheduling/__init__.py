"""Who waits, who is chosen, and why: the scheduler and its parts."""
