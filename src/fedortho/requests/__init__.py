"""Requests served on runs: forgetting, reference models, judging, comparing, tuning."""
