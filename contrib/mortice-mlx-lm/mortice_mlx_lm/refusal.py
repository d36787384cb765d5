"""Why an architecture cannot be taken apart."""

from __future__ import annotations


class Refused(Exception):
    """Says what was found, and in which layer."""
