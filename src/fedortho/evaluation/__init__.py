"""Accuracies, metrics, membership attacks, LiRA and shadow models."""
