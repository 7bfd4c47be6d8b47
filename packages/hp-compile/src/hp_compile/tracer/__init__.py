"""Capture of a whole training step as one graph."""
