"""Training of drafts for a given target, from the target's own answers."""
