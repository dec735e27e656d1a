"""Runs scheduled steps: builds input tensors, runs the model, samples."""
