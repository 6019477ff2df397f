"""``draftwise audit``: whether a server with speculation says what the model says without it."""
