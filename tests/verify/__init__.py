"""Tests of verification: `batch` builds inputs; `suite` and `edges` hold what a backend passes."""
