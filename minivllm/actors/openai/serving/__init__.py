"""Serves completions and chat: tokenizes, submits, assembles the response."""
