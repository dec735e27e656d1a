"""Reads GGUF files: a file's metadata and tensors become a transformers config and the parameters of its model."""

from minivllm.core.models.gguf.file import GGUFFile, GGUFTensor

__all__ = ["GGUFFile", "GGUFTensor"]
