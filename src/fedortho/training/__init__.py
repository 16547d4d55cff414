"""The recipe, the penalties, the objectives and the only SGD loop."""
