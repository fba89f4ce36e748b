"""Tests of what proposes tokens."""
