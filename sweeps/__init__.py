"""Studies: one YAML file each in this folder, and what plans, runs and reports them.

`study.py` checks a study and makes the choice of the best point, `jobs.py` expands it into runs and finds their
folders, `phases.py` runs them through a Hydra launcher. The Hydra plugin that makes ``study=<name>`` work is
`hydra_plugins/isomix/study.py`.
"""
