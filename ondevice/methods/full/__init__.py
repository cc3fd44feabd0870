"""First-order training of all parameters: the upper baseline."""
