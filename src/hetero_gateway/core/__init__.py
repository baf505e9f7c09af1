"""The pure core: cost model, ledger, scheduler, policies. No I/O, no clock, no global state."""
