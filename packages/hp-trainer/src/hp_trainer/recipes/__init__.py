"""Recipes: functions that return a complete `HyperTrainer.Config`, found through entry points.

In: nothing. Out: a config that the command line changes option by option. One file per model family.
"""
