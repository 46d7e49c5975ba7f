"""Real processes of a gloo group read one global batch between them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed
import torch.multiprocessing

from data.config import BytesConfig, CorpusConfig
from data.dataset import Batch, open_dataset
from data.tasks import configs

STEPS = (0, 3, 40, 123_456)
ROWS, WORLD, MICRO = 8, 2, 2


def opened(cfg: Any, cache: Path) -> Any:
    return open_dataset(cfg, BytesConfig(), global_batch=ROWS, seed=3, cache=cache)


def parts_of(batch: Batch) -> torch.Tensor:
    """(rows, 2 or 3, T): inputs, targets, segment ids if there are any."""
    parts = [batch.inputs_BT, batch.targets_BT, batch.segment_ids_BT]
    return torch.stack([part for part in parts if part is not None], dim=1)


def read(rank: int, cfgs: dict[str, Any], folder: str, target: str) -> None:
    """Micro batch by micro batch, as a run does; rank 0 keeps what all have read."""
    store = torch.distributed.FileStore(f"{folder}/store", WORLD)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    share = ROWS // WORLD
    found: dict[str, Any] = {name: [] for name in cfgs}
    for name, cfg in cfgs.items():
        dataset = opened(cfg, Path(folder) / "cache")
        for step in STEPS:
            firsts = range(rank * share, (rank + 1) * share, MICRO)
            batches = [dataset.train_batch(step, slice(first, first + MICRO)) for first in firsts]
            mine = torch.cat([parts_of(batch) for batch in batches])
            everyone = [torch.empty_like(mine) for _ in range(WORLD)]
            torch.distributed.all_gather(everyone, mine)
            counts = torch.tensor([batch.n_targets for batch in batches])
            all_counts = [torch.empty_like(counts) for _ in range(WORLD)]
            torch.distributed.all_gather(all_counts, counts)
            found[name].append((torch.cat(everyone), torch.cat(all_counts).tolist()))
    if rank == 0:
        torch.save(found, target)
    torch.distributed.destroy_process_group()


def test_two_processes_read_what_one_reads(small_corpus: CorpusConfig, tmp_path: Path) -> None:
    packings = ("bos", "bos_reset", "best_fit", "rows")
    cfgs: dict[str, Any] = {packing: replace(small_corpus, packing=packing) for packing in packings}
    cfgs["mqar"] = configs()["mqar"]()  # the number of its targets varies from row to row
    target = str(tmp_path / "found.pt")
    # One group for all of them: starting the processes takes longest. They prepare the corpus, too, both at once.
    torch.multiprocessing.spawn(read, args=(cfgs, str(tmp_path), target), nprocs=WORLD)
    found = torch.load(target)
    assert found.keys() == cfgs.keys()
    for name, cfg in cfgs.items():
        alone = opened(cfg, tmp_path / "alone")
        for step, (rows, counts) in zip(STEPS, found[name], strict=True):
            batch = alone.train_batch(step)
            assert torch.equal(rows, parts_of(batch)), (name, step)
            assert counts == [batch.n_targets] * (ROWS // MICRO), (name, step)
            if name == "bos_reset":
                assert rows.shape[1] == 3 and rows[:, 2].max() > 0  # documents do meet in a row
