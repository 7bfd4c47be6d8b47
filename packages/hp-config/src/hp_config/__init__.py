"""ConfigManager, typed command line and strict YAML of hyper-parallel; does not need torch."""

__version__ = "0.1.0"
