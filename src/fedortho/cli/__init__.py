"""The command line: one file per group of commands; it parses, calls, prints and exits."""
