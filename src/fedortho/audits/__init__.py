"""Attempts to undo forgetting, each read against a model that never knew."""
