"""The engine: requests join and leave between steps; one step is draft, select, verify, accept."""
