"""Finds, checks and loads models; turns input tensors into hidden states and logits."""
