"""Tests of verification: `batch` builds inputs, `suite` and `edges` are what every backend passes."""
