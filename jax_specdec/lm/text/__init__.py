"""Text to token ids and back: tokenizers, chat templates, bytes.

`tokenizer` reads a checkpoint's tokenizer and decodes streams of ids, `chat` makes the text of a
conversation, and `bytes` is all of that for the embedded pair, whose ids are bytes.
"""
