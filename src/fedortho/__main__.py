"""`python -m fedortho`."""

from fedortho.cli.app import main

if __name__ == "__main__":
    main()
