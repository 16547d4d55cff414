"""Evidence bundles, signatures, and checking them again."""
