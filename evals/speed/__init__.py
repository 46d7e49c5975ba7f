"""How fast our forms are beside their peers: ratios measured in one run, peer and ours in turn.

    python -m evals.speed                      # all of it; or ops, models, decode, loop
    python -m evals.speed ops only=mesa repeats=9 threads=2

Tables on the terminal, `results/speed/<suite>.json`, and for ops a log-log plot of time against length.
"""
