"""Models made elsewhere as yardsticks: the same numbers as by transformers alone, and as by lm-eval's own class for them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
import torch
import torch.nn.functional as F
import transformers
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from data.tokenizers import byte_characters
from evals.adapter import Adapter
from evals.carried import nats_of
from evals.external import External, ExternalSettings, open_external
from evals.perplexity import PerplexityConfig
from evals.perplexity import evaluate as perplexity
from evals.positions import PositionsConfig
from evals.positions import evaluate as positions
from evals.suite import Parts, Subject
from evals.throughput import SpeedConfig
from evals.throughput import evaluate as speed
from tests.evals.test_downstream import ALL, TWINS
from tests.runs.commands import ROOT, environment

EOS = "<|endoftext|>"


def save(folder: Path, model: torch.nn.Module, eos: str = EOS) -> str:
    """A model with a byte-level tokenizer of 256 bytes, a merge and EOS beside it."""
    vocab = {char: byte for byte, char in enumerate(byte_characters())} | {"th": 256, eos: 257}
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [("t", "h")]))
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=eos)
    fast.save_pretrained(folder)
    model.save_pretrained(folder)  # type: ignore[operator]
    return str(folder)


def gpt2() -> torch.nn.Module:
    """Tiny, with weights large enough that what comes before matters."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=258, n_positions=256, n_embd=16, n_layer=2, n_head=2, bos_token_id=257, eos_token_id=257
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(8)
    return model


def mamba() -> torch.nn.Module:
    """A recurrent model of transformers."""
    torch.manual_seed(0)
    config = transformers.MambaConfig(
        vocab_size=258, hidden_size=16, num_hidden_layers=2, state_size=4, bos_token_id=257, eos_token_id=257
    )
    return transformers.MambaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds the saved GPT-2 and a corpus cache."""
    folder = tmp_path_factory.mktemp("external")
    save(folder / "gpt2", gpt2())
    return folder


def subject_of(folder: Path, batch: int = 8) -> Subject:
    settings = ExternalSettings(seq_len=64)
    name, config, dataset, model = open_external(f"hf:{folder / 'gpt2'}", settings, str(folder / "cache"))
    return Subject(name, config, dataset, model, 0, batch=batch)


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("length", [48, 256])
def test_equal_to_lm_evals_own_class(folder: Path, length: int, bos: bool) -> None:
    """Every answer to every request of every kind of task, cut contexts among them."""
    subject = subject_of(folder)
    ours = Adapter(subject, max_length=length, bos=bos)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "gpt2")
    tokenizer.bos_token = EOS
    theirs = HFLM(
        pretrained=subject.model.inner,  # type: ignore[arg-type]
        tokenizer=tokenizer,
        device="cpu",
        batch_size=4,
        max_length=length,
    )
    if bos:  # this tokenizer adds no BOS of itself, so theirs gets it in another way
        encode = theirs.tok_encode
        theirs.tok_encode = lambda text, add_special_tokens=None, **_: (  # type: ignore[method-assign]
            [257] * (add_special_tokens is not False) + encode(text, add_special_tokens=False)
        )
    tasks = [task for task in ALL if not (bos and task in ("twin_rolling", "twin_recall"))]  # those go other ways
    found, wanted = (
        simple_evaluate(
            model=lm,
            tasks=tasks,
            task_manager=TaskManager(include_path=str(TWINS), include_defaults=False),
            bootstrap_iters=0,
            num_fewshot=0,
        )
        for lm in (ours, theirs)
    )
    for task in tasks:
        for one, other in zip(found["samples"][task], wanted["samples"][task], strict=True):
            for (answer,), (expected,) in zip(one["resps"], other["resps"], strict=True):
                if isinstance(answer, tuple):
                    assert answer[0] == pytest.approx(expected[0], rel=1e-5, abs=1e-4) and answer[1] == expected[1]
                elif isinstance(answer, str):
                    assert answer == expected
                else:
                    assert answer == pytest.approx(expected, rel=1e-5)
    assert (ours.truncated > 0) == (length == 48)


@pytest.mark.parametrize("build", [gpt2, mamba])
def test_state_and_single_pass_are_the_models_own_logits(build) -> None:
    inner = build()
    model = External(inner).eval()
    torch.manual_seed(1)
    tokens = torch.randint(0, 258, (3, 24))
    with torch.no_grad():
        wanted = inner(input_ids=tokens).logits
        torch.testing.assert_close(model.logits(model.features(tokens)), wanted, rtol=1e-4, atol=1e-5)
        state, found = model.init_state(3, 24), []
        for part in tokens.split((7, 9, 1, 1, 6), dim=1):
            logits, state = model.prefill(part, state)
            found.append(logits)
        torch.testing.assert_close(torch.cat(found, 1), wanted, rtol=1e-4, atol=1e-4)
        # An old state goes on as if nothing had been read since.
        early = model.read(tokens[:, :7], model.init_state(3, 24))[1]
        model.read(tokens.flip(1), early)
        again, _ = model.prefill(tokens[:, 7:16], early)
        torch.testing.assert_close(again, wanted[:, 7:16], rtol=1e-4, atol=1e-4)
    assert state.length == 24


def test_perplexity_and_positions_are_those_of_transformers(folder: Path) -> None:
    subject = subject_of(folder)
    found = perplexity(subject, PerplexityConfig(max_tokens=640), Parts(None)).metrics
    total, count = 0.0, 0
    for batch in subject.dataset.eval_batches("test", 5, 640):
        with torch.no_grad():
            logits = subject.model.inner(input_ids=batch.inputs_BT).logits  # type: ignore[operator]
        total += float(F.cross_entropy(logits.flatten(0, 1), batch.targets_BT.flatten(), reduction="sum"))
        count += int((batch.targets_BT != -100).sum())
    assert found["test/loss"] == pytest.approx(total / count, rel=1e-5)
    assert found["test/bits_per_byte"] > 0
    result = positions(subject, PositionsConfig(sequences=6), Parts(None))
    (batch, *_) = subject.dataset.eval_batches("test", 6)
    with torch.no_grad():
        graded = subject.model.grade(batch)
    torch.testing.assert_close(nats_of(subject, batch, "parallel", 10), graded.nats_BT, rtol=1e-4, atol=1e-4)
    assert result.tables["parallel"]["edges"][-1] == 64
    too_long = positions(subject, PositionsConfig(length=512), Parts(None))
    assert "at most 256 tokens" in too_long.reasons["loss"]


def test_speed_knows_its_cache(folder: Path) -> None:
    subject = subject_of(folder)
    settings = SpeedConfig(contexts=[32], batches=[2], decode_tokens=3, repeats=1)
    (row,) = speed(subject, settings, Parts(None)).tables["rows"]
    assert row["state_bytes"] == 2 * 2 * 2 * 32 * 16 * 4, "batch, keys and values, layers, tokens, width, float32"
    counts = subject.model.counts(8)
    assert counts["params"] - counts["params_non_embedding"] == (258 + 256) * 16


@pytest.mark.slow
def test_as_typed(folder: Path, tmp_path: Path) -> None:
    """python eval.py run=hf:... writes its results, skips what is there, and keeps another length apart."""
    words = [
        f"run=hf:{folder / 'gpt2'}",
        f"cache={folder / 'cache'}",
        f"external.results={tmp_path}",
        "suite=[perplexity,positions,downstream]",
        "suite.positions.sequences=2",
        "suite.perplexity.max_tokens=640",
        "suite.downstream.groups=[]",
        "suite.downstream.tasks=[twin_choice]",
        f"suite.downstream.include_path={TWINS}",
        "suite.downstream.limit=3",
        "threads=1",
    ]

    def call(*more: str, code: int = 0) -> str:
        command = [sys.executable, str(ROOT / "eval.py"), *words, *more]
        done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300)
        assert done.returncode == code, f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        return done.stdout + done.stderr

    call("external.seq_len=128")
    files = sorted(tmp_path.rglob("*.json"))
    assert [file.name.rpartition("-")[0] for file in files] == ["downstream", "perplexity", "positions"]
    assert files[2].with_suffix(".png").stat().st_size > 10_000 and files[2].with_suffix(".svg").exists()
    assert "twin_choice/acc_per_token" in json.loads(files[0].read_text())["metrics"]
    assert call("external.seq_len=128").count("is there") == 3
    call("external.seq_len=64", "suite.downstream.max_length=128")
    assert len(list(tmp_path.rglob("*.json"))) == 6
    said = call("external.seq_len=300", code=1)
    assert "external.seq_len=300: the model takes at most 256 tokens" in said and "Traceback" not in said


def test_what_cannot_be_had_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"run=hf:.*nowhere: no causal model and tokenizer of transformers"):
        open_external(f"hf:{tmp_path}/nowhere", ExternalSettings(), str(tmp_path))
    small = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=200, n_positions=64, n_embd=8, n_layer=1, n_head=1)
    )
    where = save(tmp_path / "small", small)
    with pytest.raises(ValueError, match="its tokenizer has 258 tokens and the model only 200"):
        open_external(f"hf:{where}", ExternalSettings(seq_len=32), str(tmp_path / "cache"))
    with pytest.raises(ValueError, match="external.precision=fp16: must be one of fp32, bf16"):
        ExternalSettings(precision="fp16").check("external")
