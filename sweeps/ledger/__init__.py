"""The claims of the papers, as data, and what our reports say of them. The command is `python -m sweeps.claims`."""
