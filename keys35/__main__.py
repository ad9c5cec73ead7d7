"""`python -m keys35`: the same as the `keys35` command."""

from keys35.cli import main

if __name__ == "__main__":
    main()
