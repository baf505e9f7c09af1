"""The paper's experiments in virtual time; `scripts/reproduce` writes docs/reproduction.md."""
