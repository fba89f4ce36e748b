"""Tests of verification. `backends` names those that every class of `run_on` is held to."""
