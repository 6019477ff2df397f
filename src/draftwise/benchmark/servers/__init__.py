"""Servers under load: the same prompts to several OpenAI-compatible servers, in turns."""
