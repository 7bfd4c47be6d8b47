"""The alignment matrix: one model, one initial state, the same text, through every path and every layout.

In: which layouts and rows (`python -m align8 --help`). Out: a table, alignment.md, alignment.json.
"""
