"""What changes rows of logits before they are verified, and what reports them."""
