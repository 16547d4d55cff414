"""What is written to disk: atomic files, tensors and digests, checkpoints, provenance, the journal."""
