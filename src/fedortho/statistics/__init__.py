"""What may be asked of data (sums and counts), what it costs, and the protocol of an engine."""
