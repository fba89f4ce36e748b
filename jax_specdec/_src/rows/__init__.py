"""Reading rows of a matrix of logits on a kind of device, whole or split."""
