"""Reads GGUF files: keys and tensors become a transformers config and the parameters of its model.

`file` parses, `architectures` has the tables, `keys` sees that no metadata key is left without an effect, `rope` reads
rotary embeddings, `dequantize` turns blocks into numbers, `weights` fills the model. Only `weights` imports torch.
"""
