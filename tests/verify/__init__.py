"""Tests of verification. `suite`, `edges` and `bad_rows` hold what every backend must pass."""
