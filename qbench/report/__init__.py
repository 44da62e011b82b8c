"""What a run looks like: tables, figures, one page, and the end of a console run.

``open_run`` gives a run with its tables; ``figures`` draws; ``page`` writes everything into one
file; ``summary`` is what the command line prints.
"""
