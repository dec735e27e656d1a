"""The Ingress deployment: HTTP and handle calls in, token ids to the engine."""
