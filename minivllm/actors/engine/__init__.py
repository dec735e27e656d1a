"""The Engine deployment: one replica that runs the LLMEngine in a thread of its own."""
