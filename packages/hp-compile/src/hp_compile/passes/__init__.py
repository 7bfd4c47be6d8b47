"""Passes over a captured step, and the pipeline that runs them."""
