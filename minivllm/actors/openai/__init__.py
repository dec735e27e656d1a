"""The OpenAI API: request models, answers, streams and errors. No Ray here, so that tests can drive it in-process."""
