"""Continue a prompt with a trained run; the text appears as it is made.

python generate.py run=results/runs/quickstart/swa-1a2b3c4d5e prompt="In the beginning" tokens=200 temperature=0.8
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from pathlib import Path

from runs.cli import patient_threads
from runs.validate import ConfigError, command_line


@dataclass
class Command:
    """The command line: key=value."""

    run: str = "???"
    prompt: str = ""
    tokens: int = 200
    temperature: float = 0.8
    top_p: float = 0.95
    seed: int = 0


def main(arguments: list[str]) -> int:
    """Generate. Bad input ends with one sentence and exit code 1."""
    patient_threads()
    logging.basicConfig(level=logging.WARNING)
    try:
        command = command_line(Command, arguments)
        import torch

        from models.generation import generate
        from runs.load import load_run

        trained = load_run(Path(command.run))
        tokenizer = trained.dataset.tokenizer
        if tokenizer is None:
            raise ConfigError(f"run={command.run}: was trained on a task, whose tokens stand for no text")
        tokens = generate(
            trained.model,
            torch.tensor([[tokenizer.bos_id, *tokenizer.encode(command.prompt).tolist()]]),
            command.tokens,
            temperature=command.temperature,
            top_p=command.top_p,
            seed=command.seed,
        )
        sys.stdout.write(command.prompt)
        for piece in tokenizer.decode_stream(int(token[0]) for token in tokens):
            sys.stdout.write(piece)
            sys.stdout.flush()
        sys.stdout.write("\n")
    except (ConfigError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
