"""`python -m saguaro` is the `saguaro` command."""

from saguaro.serve.cli import main

main()
