"""Tool calling: tools in prompts, constrained calls, and parsers of tool calls."""
