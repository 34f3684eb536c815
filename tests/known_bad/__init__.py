"""Rollouts with exactly one fault each. Each says which clauses it has to fail, and a word of why."""

from .registry import KNOWN_BAD, ODD_BUT_RIGHT, REFERENCE, Case, started

__all__ = ["KNOWN_BAD", "ODD_BUT_RIGHT", "REFERENCE", "Case", "started"]
