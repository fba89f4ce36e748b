"""Draft distributions: drawn, stored, planned."""
