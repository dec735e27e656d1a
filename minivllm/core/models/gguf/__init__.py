"""Reads GGUF files: a file's metadata and tensors become a transformers config and the parameters of its model."""
