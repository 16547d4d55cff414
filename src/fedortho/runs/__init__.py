"""Run directories: settings, records, training, and runs derived from others."""
