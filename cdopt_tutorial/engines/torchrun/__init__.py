"""A run whose processes torchrun started; each launches its own worker."""
