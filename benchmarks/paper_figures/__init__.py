"""Figures that only benchmarks draw; those of a report are in fedortho.reports.figures."""
