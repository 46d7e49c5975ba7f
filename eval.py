"""Evaluate trained runs: python eval.py run=results/runs/<study>/<run> suite=[perplexity,positions]"""

import sys

import hydra
from omegaconf import DictConfig

from runs.cli import explained


@hydra.main(version_base="1.3", config_path="conf", config_name="eval")
def main(cfg: DictConfig) -> None:
    """All suites on all runs. Everything heavy is imported in here, so that --help and --cfg answer at once."""
    from evals.run import evaluate

    if not evaluate(cfg):
        sys.exit(1)


if __name__ == "__main__":
    with explained():
        main()
