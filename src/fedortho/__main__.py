"""`python -m fedortho`."""

from fedortho.cli import main

if __name__ == "__main__":
    main()
