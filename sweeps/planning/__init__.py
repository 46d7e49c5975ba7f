"""What `python -m sweeps.plan` is made of: which runs, their costs, memory by a dry run, time by measured speed."""
