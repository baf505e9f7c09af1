"""Everything specific to an engine: one module per engine, used by all that talk to one."""
