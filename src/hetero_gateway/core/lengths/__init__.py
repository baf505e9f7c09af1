"""How long prompts and answers are: estimates that learn from what finished."""
