"""`python -m penstock` is the command `penstock`."""

from penstock.frontends.cli import main

main()
