"""`python -m warmset`."""

from warmset.cli import main

main()
