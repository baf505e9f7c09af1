"""Client limits: windows of a minute, what a request is charged, and what it really used."""
