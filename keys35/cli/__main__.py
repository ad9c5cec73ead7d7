"""`python -m keys35.cli`, where no console script is installed."""

from keys35.cli import main

main()
