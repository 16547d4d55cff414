"""Recipe, penalties, objectives, batches and the only SGD loop."""
