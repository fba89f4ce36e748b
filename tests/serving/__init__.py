"""Tests of the decoding loop: `tiny` has models that can be known entirely, `chi_square` a test."""
