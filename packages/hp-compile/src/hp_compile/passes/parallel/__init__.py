"""Passes that partition a step over ranks."""
