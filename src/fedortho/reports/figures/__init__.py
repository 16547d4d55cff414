"""Figures of runs: functions that take values and return matplotlib's Figure; none shows or saves it."""
