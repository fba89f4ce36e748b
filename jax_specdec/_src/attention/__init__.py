"""Attention of a few new rows of each request over its cache."""
