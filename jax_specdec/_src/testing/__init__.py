"""What tests compare with: the oracle, and whether rows depend on each other."""
