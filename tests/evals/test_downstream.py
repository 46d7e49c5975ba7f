"""lm-eval through the adapter: equal to plain full forwards and to lm-eval's own class for Hugging Face models, whatever
the batches; every task that a group names exists."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml

from evals.adapter import Adapter, rows_of
from evals.downstream import DownstreamConfig, known_tasks
from evals.downstream import evaluate as downstream
from evals.groups import GROUPS, Entry
from evals.suite import Parts, Subject
from evals.tasks.recall import contains, prompt
from tests.contract.cases import NAMES
from tests.evals.test_suites import numbers, subject_of
from tests.evals.test_suites import texts as texts  # the fixture

TWINS = Path(__file__).parent / "tasks"
MIXERS = ("transformer", "mesa", "toeplitz", "maglev", "mamba2")
ALL = ["twin_choice", "twin_inputs", "twin_cloze", "twin_rolling", "twin_recall"]


def pairs() -> list[tuple[list[int], list[int]]]:
    """Contexts of several lengths, some of them shared, with continuations of several lengths."""
    rng = np.random.default_rng(0)
    contexts = [rng.integers(0, 256, size=n).tolist() for n in (1, 9, 9, 14, 20)]
    out = [(c, rng.integers(0, 256, size=1 + i % 4).tolist()) for i, c in enumerate(contexts * 3)]
    return [*out, (contexts[-1], out[0][1]), ([7], [8])]


def plain(subject: Subject, before: list[int], after: list[int], length: int) -> tuple[float, bool]:
    """By one whole forward pass of this request alone."""
    ids = torch.tensor([[*before, *after][-(length + 1) :]])
    with torch.no_grad():
        logits = subject.model.logits(subject.model.deployed_features(ids[:, :-1]))[0, -len(after) :]
    logp = F.log_softmax(logits.double(), -1)
    target = torch.tensor(after)
    return float(logp[range(len(after)), target].sum()), bool((logits.argmax(-1) == target).all())


def requests(kind: str, *arguments: tuple) -> list[Instance]:
    return [Instance(request_type=kind, doc={}, arguments=a, idx=0) for a in arguments]  # type: ignore[arg-type]


@pytest.mark.parametrize("rows", [1, 3, 64])
@pytest.mark.parametrize("length", [12, 32])
@pytest.mark.parametrize("name", MIXERS)
def test_scores_equal_a_plain_forward_in_any_batch(name: str, length: int, rows: int, texts: Path) -> None:
    subject = subject_of(name, texts)
    subject.batch = subject.recurrent_batch = rows
    adapter = Adapter(subject, max_length=length)
    for (nats, greedy), (before, after) in zip(adapter.score(pairs()), pairs(), strict=True):
        wanted, right = plain(subject, before, after, length)
        assert nats == pytest.approx(wanted, abs=1e-5, rel=1e-5) and greedy == right
    cut = sum(len(before) + len(after) > length + 1 for before, after in pairs())
    assert adapter.truncated == cut and (cut > 0) == (length == 12)


@pytest.mark.parametrize("name", NAMES)
def test_a_shared_context_is_read_once_and_changes_nothing(name: str, texts: Path, monkeypatch) -> None:
    subject = subject_of(name, texts)
    adapter, read = Adapter(subject, max_length=32), []
    whole = subject.model.read
    monkeypatch.setattr(
        subject.model, "read", lambda tokens, *a, **k: read.append(tokens.numel()) or whole(tokens, *a, **k)
    )
    before, options = list(range(60, 80)), [[5, 6], [7], [8, 9, 10]]
    found = adapter.score([(before, option) for option in options])
    for (nats, greedy), option in zip(found, options, strict=True):
        wanted, right = plain(subject, before, option, 32)
        assert nats == pytest.approx(wanted, abs=2e-5, rel=2e-5) and greedy == right
    assert read[:2] == [19, 9], "19 tokens once; the last of the context and all but the last of an option, padded to 3"


@pytest.mark.parametrize("rows", [1, 2, 64])
@pytest.mark.parametrize("name", MIXERS)
def test_generation_is_the_greedy_choice_of_whole_forwards(name: str, rows: int, texts: Path) -> None:
    subject = subject_of(name, texts)
    subject.batch = subject.recurrent_batch = rows
    adapter = Adapter(subject, max_length=32)
    contexts = ["a number", "12 is", "", "and 13 is the next one of all numbers"]
    asked = requests("generate_until", *((c, {"until": ["\n\n"], "max_gen_toks": 6}) for c in contexts))
    for context, text in zip(contexts, adapter.generate_until(asked), strict=True):
        ids, made = adapter.tok_encode(context)[-26:], []
        while len(made) < 6:
            with torch.no_grad():
                features = subject.model.deployed_features(torch.tensor([[*ids, *made]]))
                token = int(subject.model.logits(features)[0, -1].argmax())
            if token == adapter.eot_token_id:
                break
            made.append(token)
        assert text == subject.dataset.tokenizer.decode(made).split("\n\n")[0]


class Parrot(torch.nn.Module):
    """Says a text token by token, whatever it is told."""

    modes = ("parallel",)

    def __init__(self, says: list[int]):
        super().__init__()
        self.says, self.weight = says, torch.nn.Parameter(torch.zeros(1))

    def init_state(self, rows: int, max_len: int) -> int:
        return 0

    def read(self, tokens: torch.Tensor, state: int, **_) -> tuple[torch.Tensor, int]:
        return F.one_hot(torch.full_like(tokens, self.says[state]), 257).float(), state + 1

    def logits(self, features: torch.Tensor) -> torch.Tensor:
        return features

    def step(self, tokens: torch.Tensor, state: int, **_) -> tuple[torch.Tensor, int]:
        logits, state = self.read(tokens[:, None], state)
        return logits[:, 0], state


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"until": ["\n"], "max_gen_toks": 48}, "one. two"),
        ({"until": "two\n", "max_gen_toks": 48}, "one. "),
        ({"until": [".", "\n"], "max_new_tokens": 48, "do_sample": False, "temperature": 0.0}, "one"),
        ({"until": ["\n"], "max_gen_toks": 5}, "one. "),
        ({}, "one. two\nthree"),
        ({"until": [""], "max_gen_toks": 60}, "one. two\nthree"),
    ],
)
def test_generation_ends_at_stops_at_bos_and_at_the_limit(options: dict, text: str, texts: Path) -> None:
    subject = subject_of("transformer", texts)
    subject.model = Parrot([*b"one. two\nthree", 256, *b"never said"])  # type: ignore[assignment]
    adapter = Adapter(subject, max_length=64)
    assert adapter.generate_until(requests("generate_until", ("x", options))) == [text]


def test_what_cannot_be_is_said(texts: Path) -> None:
    adapter = Adapter(subject_of("transformer", texts), max_length=32)
    with pytest.raises(ValueError, match="max_length=32: must be more than the 40 tokens"):
        adapter.generate_until(requests("generate_until", ("x", {"max_gen_toks": 40})))
    with pytest.raises(ValueError, match="generates greedily"):
        adapter.generate_until(requests("generate_until", ("x", {"do_sample": True})))
    with pytest.raises(ValueError, match="max_length=32: must be at least 33"):
        adapter.score([([1], [2] * 33)])
    with pytest.raises(ValueError, match="suite.downstream.groups=glob: must be one of global, local"):
        DownstreamConfig(groups=["glob"]).check("suite.downstream")
    with pytest.raises(ValueError, match="suite.downstream.include_path=/nowhere: must be a folder"):
        DownstreamConfig(include_path="/nowhere").check("suite.downstream")


def test_rolling_scores_each_token_once(texts: Path) -> None:
    subject = subject_of("gated_deltanet", texts)
    text = "1 is a number, and 2 is the next."
    long, short = (Adapter(subject, max_length=n) for n in (64, 10))
    ids = long.tok_encode(text, add_special_tokens=False)
    (found,) = long.loglikelihood_rolling(requests("loglikelihood_rolling", (text,)))
    assert found == pytest.approx(plain(subject, [256], ids, 64)[0], rel=1e-5)
    uniform = subject_of("gated_deltanet", texts, uniform=True)
    for adapter in (Adapter(uniform, max_length=10), Adapter(uniform, max_length=7)):
        both = adapter.loglikelihood_rolling(requests("loglikelihood_rolling", (text,), (text[:11],)))
        assert both == pytest.approx([-len(text) * math.log(257), -11 * math.log(257)], rel=1e-6)
    assert short.loglikelihood_rolling(requests("loglikelihood_rolling", (text,))) != pytest.approx([found], rel=1e-6)


def test_spaces_before_a_border_belong_to_what_follows(texts: Path) -> None:
    adapter = Adapter(subject_of("transformer", texts), max_length=32)
    assert adapter.pair("ab ", "cd") == ([256, *b"ab"], [*b" cd"])
    assert adapter.pair("", "cd") == adapter.pair("", "cd") == ([256], [*b"cd"])
    assert adapter.pair("  ", "cd") == ([256], [*b"  cd"])
    bare = Adapter(subject_of("transformer", texts), max_length=32, bos=False)
    assert bare.pair("ab ", "cd") == ([*b"ab"], [*b" cd"])


def test_rows_of_a_state_are_those_that_were_named(texts: Path) -> None:
    model = subject_of("maglev", texts).model
    tokens = torch.tensor([[1, 2, 3], [4, 5, 6]])
    with torch.no_grad():
        _, state = model.read(tokens, model.init_state(2, 8))
        picked = rows_of(state, torch.tensor([1, 0, 1]))
        found, _ = model.read(torch.tensor([[7], [7], [7]]), picked)
        wanted, _ = model.read(torch.tensor([[7], [7]]), state)
    torch.testing.assert_close(found, wanted[[1, 0, 1]])


@pytest.mark.parametrize("name", ["transformer", "maglev"])
def test_the_suite_on_twins_of_every_kind_of_task(name: str, texts: Path, tmp_path: Path) -> None:
    """All kinds of requests end to end; batches change no number; a finished part is not done again."""
    subject = subject_of(name, texts)
    config = DownstreamConfig(groups=[], tasks=ALL, include_path=str(TWINS), max_length=64, limit=3)
    parts = Parts(tmp_path / "parts.json")
    result = downstream(subject, config, parts)
    metrics = result.metrics
    kinds = {"acc", "acc_norm", "acc_per_token"}
    assert {f"twin_choice/{kind}" for kind in kinds} <= set(metrics)
    assert {"twin_cloze/perplexity", "twin_rolling/bits_per_byte", "twin_recall/contains"} <= set(metrics)
    assert metrics["twin_inputs/acc"] == metrics["twin_inputs/acc_per_token"], "its options are equally long"
    table = result.tables["twin_choice"][0]
    assert table["n"] == 3 and np.mean(table["documents"]["acc_per_token"]) == metrics["twin_choice/acc_per_token"]
    other = subject_of(name, texts)
    other.batch = other.recurrent_batch = 2
    assert numbers(downstream(other, config, Parts(None)).metrics) == pytest.approx(numbers(metrics), rel=1e-5)
    subject.model = type("Modes", (), {"modes": subject.model.modes})()  # type: ignore[assignment]
    assert downstream(subject, config, Parts(tmp_path / "parts.json")).metrics == metrics


def test_teacher_forced_scores_stand_beside_those_of_the_deployed_model(texts: Path, monkeypatch) -> None:
    """Of likelihoods, in one pass; what is generated is the deployed model's alone, and so is its group's mean."""
    subject = subject_of("maglev", texts)
    adapter = Adapter(subject, max_length=20, mode="teacher_forced")
    assert adapter.rows == subject.batch
    for (nats, greedy), (before, after) in zip(adapter.score(pairs()), pairs(), strict=True):
        ids = torch.tensor([[*before, *after][-21:]])
        with torch.no_grad():
            logits = subject.model.logits(subject.model.features(ids[:, :-1]))[0, -len(after) :]
        target = torch.tensor(after)
        assert nats == pytest.approx(float(logits.log_softmax(-1)[range(len(after)), target].sum()), rel=1e-4)
        assert greedy == bool((logits.argmax(-1) == target).all())
    choice, recall = Entry("twin_choice", "acc"), Entry("twin_recall", "contains")
    monkeypatch.setitem(GROUPS, "local", (choice,))
    monkeypatch.setitem(GROUPS, "recall", (choice, recall))
    config = DownstreamConfig(groups=["local", "recall"], include_path=str(TWINS), max_length=64, limit=3)
    result = downstream(subject, config, Parts(None))
    found = result.metrics
    for name in ("twin_choice/acc", "twin_choice/acc_per_token", "local/per_token", "local/lm_eval"):
        assert {name, f"teacher_forced/{name}"} <= set(found)
    assert found["teacher_forced/local/lm_eval"] == found["teacher_forced/twin_choice/acc"]
    assert "twin_recall/contains" in found and "recall/lm_eval" in found
    assert found["teacher_forced/twin_recall"] is None and "teacher_forced/recall/lm_eval" not in found
    assert "generated" in result.reasons["teacher_forced/twin_recall"]
    documents = result.tables["teacher_forced/twin_choice"][0]["documents"]["acc_per_token"]
    assert np.mean(documents) == found["teacher_forced/twin_choice/acc_per_token"]


def test_options_are_ranked_by_nats_per_token(texts: Path) -> None:
    """A uniform model's first option of the fewest tokens wins undivided; divided by tokens all are equal."""
    subject = subject_of("transformer", texts, uniform=True)
    config = DownstreamConfig(groups=[], tasks=["twin_choice"], include_path=str(TWINS), max_length=256)
    result = downstream(subject, config, Parts(None))
    rows = [json.loads(line) for line in (TWINS / "twins.jsonl").read_text().splitlines()]
    shortest = [int(np.argmin([len(option) for option in row["options"]])) == row["gold"] for row in rows]
    assert result.metrics["twin_choice/acc"] == pytest.approx(np.mean(shortest))
    # log p of n tokens divided by n is the same for all n, up to rounding: any option may come first.
    assert result.tables["twin_choice"][0]["documents"]["acc"] == pytest.approx([float(x) for x in shortest])


def test_examples_are_drawn_by_seed(texts: Path, monkeypatch) -> None:
    subject = subject_of("transformer", texts)
    entry = Entry("twin_choice", "acc_norm", "part", shots=(0, 2), prefixes=3)
    monkeypatch.setitem(GROUPS, "local", (entry,))
    config = DownstreamConfig(groups=["local"], include_path=str(TWINS), limit=4, max_length=512)
    result = downstream(subject, config, Parts(None))
    draws = result.tables["twin_choice/shots=2"]
    assert len(draws) == 3 and len(result.tables["twin_choice/shots=0"]) == 1
    values = [draw["metrics"]["acc_norm"] for draw in draws]
    assert result.metrics["twin_choice/shots=2/acc_norm"] == pytest.approx(np.mean(values))
    assert result.metrics["twin_choice/shots=2/acc_norm_std"] == pytest.approx(np.std(values, ddof=1))
    assert result.metrics["local/part/shots=2/lm_eval"] == pytest.approx(np.mean(values))
    assert result.metrics["local/part/shots=0/per_token"] == result.metrics["twin_choice/shots=0/acc_per_token"]
    assert downstream(subject, config, Parts(None)).metrics == result.metrics


def test_failed_tasks_are_told_and_the_others_kept(texts: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    for file in TWINS.iterdir():
        if file.is_file():
            (own / file.name).write_text(file.read_text())
    (own / "broken.yaml").write_text(
        (TWINS / "twin_cloze.yaml").read_text().replace("twin_cloze", "broken").replace("answer", "no.such.field")
    )
    config = DownstreamConfig(
        groups=[], tasks=["twin_choice", "broken"], include_path=str(own), max_length=128, limit=2
    )
    with pytest.raises(RuntimeError, match=r"1 of 2 tasks failed, the others are kept: broken \("):
        downstream(subject_of("transformer", texts), config, Parts(tmp_path / "parts.json"))
    assert "twin_choice" in (tmp_path / "parts.json").read_text()


def test_a_bound_mixer_says_why_it_has_no_number(texts: Path) -> None:
    config = DownstreamConfig(tasks=["twin_choice"], groups=[], include_path=str(TWINS), max_length=128)
    result = downstream(subject_of("toeplitz", texts), config, Parts(None))
    assert result.metrics == {"downstream": None} and "at most 64 tokens" in result.reasons["downstream"]


@pytest.fixture(scope="module")
def installed() -> TaskManager:
    """All tasks of the installed lm-eval, and ours."""
    return known_tasks(["hellaswag"], None)


def test_every_named_task_exists_and_unknown_ones_get_a_hint(installed: TaskManager) -> None:
    known = set(installed.all_tasks)
    assert {entry.task for group in GROUPS.values() for entry in group} <= known
    with pytest.raises(ValueError, match=r"suite.downstream.tasks=hellaswg: must be a task.*hellaswag"):
        known_tasks(["hellaswg"], None)


def test_every_named_metric_is_one_of_its_task(installed: TaskManager) -> None:
    for entry in {entry for group in GROUPS.values() for entry in group if entry.metric is not None}:
        path = installed.task_index[entry.task].yaml_path
        node = load_yaml(path, resolve_func=False, recursive=True)
        listed = [row["metric"] for row in node.get("metric_list", [])]
        if not listed:  # a class of its own
            listed = re.findall(r'^ +"(\w+)": ', path.with_name("task.py").read_text(), re.MULTILINE)
        assert entry.metric in listed, entry


def test_recall_prompts_break_off_before_the_answer() -> None:
    doc = {"context": "[DOC] Anna went home. She lives in", "question": "She lives in", "answers": ["Rome", "Roma"]}
    assert prompt(doc) == "Anna went home. She lives in"
    assert prompt(doc | {"context": "Anna went home"}) == "Anna went home. She lives in"
    assert contains(doc, [" ROMA, they say"]) == {"contains": 1.0} and contains(doc, [" Paris"]) == {"contains": 0.0}


def test_tasks_of_numbers_and_labels_have_no_text(texts: Path) -> None:
    subject = subject_of("transformer", texts)
    subject.dataset = type("NoText", (), {"tokenizer": None})()  # type: ignore[assignment]
    with pytest.raises(ValueError, match="needs text"):
        Adapter(subject, max_length=32)


def test_simple_evaluate_takes_the_adapter_as_it_is(texts: Path) -> None:
    """As a user of lm-eval would call it, without the suite."""
    adapter = Adapter(subject_of("mesa", texts), max_length=128)
    manager = TaskManager(include_path=str(TWINS), include_defaults=False)
    found = simple_evaluate(model=adapter, tasks=["twin_rolling"], task_manager=manager, bootstrap_iters=0, limit=3)
    assert 7 < found["results"]["twin_rolling"]["bits_per_byte,none"] < 9
