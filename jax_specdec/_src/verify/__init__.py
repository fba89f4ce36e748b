"""Verification of drafts: one file per rule, one per backend, and the call that joins them."""
