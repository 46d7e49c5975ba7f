"""Train one run, a multirun or a study: python train.py mixer=swa mixer.window=128 optimizer.lr=2e-3"""

import sys

import hydra
from omegaconf import DictConfig

from runs.cli import explained, study_rows


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg: DictConfig) -> None:
    """One run. Everything heavy is imported in here, so that --help and --cfg answer at once."""
    from runs.run import run

    run(cfg)


if __name__ == "__main__":
    sys.argv[1:] = study_rows(sys.argv[1:])
    with explained():
        main()
