"""The Flower app: two shims, no logic."""
