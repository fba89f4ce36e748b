"""Decoding loops and what they report."""
