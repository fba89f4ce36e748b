"""What steps emitted, and how much of it was accepted."""
