"""Text to token ids and back: tokenizers, chat templates, bytes."""
