"""Drafting: with a smaller model, or by lookup in the sequence itself."""
