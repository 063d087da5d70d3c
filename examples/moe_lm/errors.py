"""What is told to the user in one line, without a traceback."""

from __future__ import annotations


class UserError(Exception):
    """Something that the person who started the run can put right; the message says what."""
