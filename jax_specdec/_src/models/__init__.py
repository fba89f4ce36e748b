"""The model protocol, a small Llama, its checkpoint format and byte tokenization."""
