"""Real processes of a gloo group read one global batch between them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
import torch.multiprocessing

from data.config import BytesConfig, CorpusConfig
from data.dataset import open_dataset

STEPS = (0, 3, 40, 123_456)
WORLD, MICRO = 2, 2


def read(rank: int, cfg: CorpusConfig, folder: str, target: str) -> None:
    """Micro batch by micro batch, as a run does; rank 0 keeps what all have read."""
    store = torch.distributed.FileStore(f"{folder}/store", WORLD)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    dataset = open_dataset(cfg, BytesConfig(), global_batch=8, seed=3, cache=Path(folder) / "cache")
    found = []
    for step in STEPS:
        own = [slice((rank * 4) + first, (rank * 4) + first + MICRO) for first in range(0, 4, MICRO)]
        parts = [dataset.train_batch(step, rows) for rows in own]
        mine = torch.stack(
            [torch.cat([part.inputs_BT for part in parts]), torch.cat([part.targets_BT for part in parts])]
        )
        everyone = [torch.empty_like(mine) for _ in range(WORLD)]
        torch.distributed.all_gather(everyone, mine)
        counts = torch.tensor([part.n_targets for part in parts])
        found.append((torch.cat(everyone, dim=1), counts))
    if rank == 0:
        torch.save(found, target)
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("packing", ["bos", "best_fit", "rows"])
def test_two_processes_read_what_one_reads(small_corpus: CorpusConfig, tmp_path: Path, packing: str) -> None:
    cfg = replace(small_corpus, packing=packing)
    target = str(tmp_path / "found.pt")
    torch.multiprocessing.spawn(read, args=(cfg, str(tmp_path), target), nprocs=WORLD)  # prepares it, too, both at once
    alone: Any = open_dataset(cfg, BytesConfig(), global_batch=8, seed=3, cache=tmp_path / "alone")
    for step, (tokens, counts) in zip(STEPS, torch.load(target), strict=True):
        batch = alone.train_batch(step)
        assert torch.equal(tokens[0], batch.inputs_BT) and torch.equal(tokens[1], batch.targets_BT)
        assert counts.tolist() == [batch.n_targets] * 2
