"""The pool of runs that claims and the race share."""
