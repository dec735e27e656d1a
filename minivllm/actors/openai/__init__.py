"""The OpenAI API without Ray, so that tests can drive it in one process."""
