"""What can go wrong in a benchmark that is nobody's bad flag."""

from __future__ import annotations


class BenchError(Exception):
    """A run that can't give honest numbers: a block missing, a process dead. The message is one line for the user."""
