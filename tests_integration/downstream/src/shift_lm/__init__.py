"""A language model of its own for hp. Importing it loads nothing, so that `hp list` stays quick."""
