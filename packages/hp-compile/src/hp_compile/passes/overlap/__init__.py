"""Passes that schedule communication."""
