"""`python -m saguaro` is the `saguaro` command."""

from saguaro.cli.main import main

main()
