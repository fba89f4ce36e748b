"""How a kernel for Mosaic GPU is written: what threads do, and which GPUs run it."""
