"""Flower's PyTorch quickstart, made to forget."""
