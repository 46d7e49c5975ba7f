"""Evaluate trained runs: python eval.py run=results/runs/<study>/<run> suite=[perplexity,positions]

All finished runs of a study: python eval.py study=<name> suite=[perplexity,positions]
"""

import re
import sys

import hydra
from omegaconf import DictConfig

from runs.cli import explained

NAME, STUDY = re.compile(r"[^\[\],\s]+"), r"study:\g<0>"


def arguments(words: list[str]) -> list[str]:
    """``study=<name>`` as ``run=study:<name>``: `study` is a config group, and Hydra would compose the study into this config
    and run it. Here its name only says whose runs are evaluated. Ends the program where both are given."""
    studies = [word for word in words if word.startswith("study=")]
    others = [word for word in words if word.startswith("run=")]
    if studies and others:
        sys.exit(f"{studies[0]} and {others[0]}: name one of the two, or list all in run=[study:<name>,<run folder>]")
    return [f"run={NAME.sub(STUDY, word.removeprefix('study='))}" if word in studies else word for word in words]


@hydra.main(version_base="1.3", config_path="conf", config_name="eval")
def main(cfg: DictConfig) -> None:
    """All suites on all runs. Everything heavy is imported in here, so that --help and --cfg answer at once."""
    from evals.run import evaluate

    if not evaluate(cfg):
        sys.exit(1)


if __name__ == "__main__":
    sys.argv[1:] = arguments(sys.argv[1:])
    with explained():
        main()
