"""`python -m quaver`: the command line."""

from quaver.cli.main import main

main()
