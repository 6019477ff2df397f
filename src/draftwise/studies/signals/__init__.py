"""What signals tell of acceptance, and what deciding by them gains."""
