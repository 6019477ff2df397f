"""An OpenAI-compatible server."""
