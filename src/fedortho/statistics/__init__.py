"""Sums over images that add up: observations, the ledger of a trained model, responses, products of inputs."""
