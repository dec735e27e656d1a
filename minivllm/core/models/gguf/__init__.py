"""Reads GGUF files: keys and tensors become a transformers config and the parameters of its model.

`file` parses and maps a file. `architectures` and `tensor_names` are the tables. By them `config` reads the metadata,
with `rope` for rotary embeddings and `keys` to see that no key is left without an effect; `weights` fills the model,
with `dequantize` for its blocks. Only `weights` imports torch.
"""
