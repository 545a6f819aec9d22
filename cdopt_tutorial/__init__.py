"""Distributed training with constrained weights: the tested code behind the book."""
