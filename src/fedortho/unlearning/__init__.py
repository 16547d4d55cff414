"""The method: rank kernels, select them, repair batch norms, scrub, remove directions, calibrate, plan."""
