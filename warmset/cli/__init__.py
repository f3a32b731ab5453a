"""The command line: parse, build one configuration, call one function; one file a group of commands.

Answers go to stdout, everything else to stderr. Bad input is one sentence on stderr and exit code 2.
"""

from __future__ import annotations

from . import ab, ab_arms, bench, drafts, generate, machine, price, profile, tools, trace, window  # noqa: F401  # each registers its commands on the application
from .common import app
from .main import main

__all__ = ["app", "main"]
