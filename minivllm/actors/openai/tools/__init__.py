"""Function calling: prompts, constraints and parsers of tool calls."""
