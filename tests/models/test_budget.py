"""`match`: one field is turned until a model meets the reference's budget, exactly as its counts say."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from models.budget import COUNTS, LIMITS, CannotMeet, Shape, counts, meet
from models.lm import build_model
from runs.folder import read_json
from runs.identity import identify
from runs.load import load_run
from runs.validate import ConfigError, reference, validate
from tests.runs.commands import ROOT, folders, train

MIXERS = sorted(path.stem for path in (ROOT / "conf" / "mixer").glob("*.yaml"))
SIZES = {"1M": ["model.d_model=192"], "140m": ["model=140m"], "940m": ["model=940m"]}
GPT2 = Shape(50_257)


def composed(*overrides: str):
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return compose("config", overrides=list(overrides))


def met(*overrides: str, shape: Shape = GPT2):
    """(config as asked, turned config, how)"""
    raw = composed(*overrides)
    config = validate(raw)
    return config, *meet(config, reference(raw, config), shape)


# ---- parameters and FLOPs --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize("by", ["params", "flops"])
def test_every_mixer_meets_the_transformers_budget_by_its_mlp(by, name, size):
    """Or says why it cannot: then the layer alone costs more than the transformer's whole block."""
    overrides = [f"mixer={name}", f"match={by}", "data.seq_len=2048", *SIZES[size]]
    target = counts(validate(composed(*overrides, "mixer=transformer", "match=none")), GPT2)[COUNTS[by]]
    try:
        asked, turned, how = met(*overrides)
    except CannotMeet as cannot:
        assert f"match={by}: mixer {validate(composed(*overrides)).mixer.kind}" in str(cannot)
        least = validate(composed(*overrides, "match=none", "model.mlp_width=1"))
        assert counts(least, GPT2)[COUNTS[by]] > target
        return
    reached = counts(turned, GPT2)[COUNTS[by]]
    assert abs(reached - target) <= LIMITS[by] * target
    assert (how.target, how.reached, how.met) == (target, reached, True)
    assert how.residual == pytest.approx((reached - target) / target, abs=1e-12)
    assert turned.mixer == asked.mixer, "nothing of the mixer is touched"
    if how.knob is None:
        assert turned is asked
    else:
        assert (how.knob, how.before, how.value) == ("model.mlp_width", asked.model.mlp_width, turned.model.mlp_width)


def test_the_reference_meets_its_own_budget_as_it_is():
    for by in COUNTS:
        asked, turned, how = met("mixer=swa", f"match={by}", "match_reference=swa")
        assert turned is asked and how.residual == 0 and how.knob is None


def test_a_model_of_a_billion_parameters_takes_about_a_second():
    raw = composed("mixer=mesa", "model=940m", "match=flops", "data.seq_len=2048")
    config = validate(raw)
    other = reference(raw, config)
    meet(config, other, GPT2)
    begin = time.process_time()
    meet(config, other, GPT2)
    assert time.process_time() - begin < 2, "0.1 s alone; the limit allows for a machine that is busy"


def test_two_passes_are_paid_for_by_the_mlp():
    """Of parameters a two-pass model has the deployed decoder's; its training FLOPs are those of both passes."""
    _, by_params, _ = met("mixer=maglev", "match=params", "model=140m")
    _, by_flops, _ = met("mixer=maglev", "match=flops", "model=140m")
    _, once, _ = met("mixer=maglev", "mixer.training=bptt", "match=flops", "model=140m")
    assert by_flops.model.mlp_width < 0.5 * by_params.model.mlp_width
    assert once.model.mlp_width > by_flops.model.mlp_width


def test_flops_depend_on_the_length_and_parameters_do_not():
    widths = {
        (by, length): met("mixer=swa", f"match={by}", f"data.seq_len={length}")[1].model.mlp_width
        for by in ("params", "flops")
        for length in (256, 4096)
    }
    assert widths["params", 256] == widths["params", 4096] < widths["flops", 256] < widths["flops", 4096]


def test_a_tasks_vocabulary_counts():
    """A larger output matrix weighs on both models alike, so the same width meets the budget."""
    _, small, near = met("mixer=swa", "match=flops", shape=Shape(16))
    _, large, far = met("mixer=swa", "match=flops", shape=Shape(4096))
    assert small.model.mlp_width == pytest.approx(large.model.mlp_width, abs=16)
    assert near.target < far.target
    _, read, how = met("mixer=swa", "match=params", shape=Shape(16, readout_len=64))
    assert read.model == small.model or how.knob is None


# ---- state -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["swa", "maglev", "lrt"])
def test_a_window_is_as_long_as_the_state_asks(name, precision):
    """With the transformer's state after n tokens the window is n; with Mesa's it holds as many numbers as its matrices,
    twice as many where keys and values are in bf16 and the matrices are not."""
    overrides = [f"mixer={name}", "match=state", f"precision={precision}", "model=140m"]
    assert met(*overrides, "match_len=512")[1].mixer.window == 512
    asked, turned, how = met(*overrides, "match_len=4096", "match_reference=mesa")
    matrices = 2 * 128**2 * 4  # bytes of G and H of one head
    assert turned.mixer.window == pytest.approx(matrices / (2 * 128 * (2 if precision == "bf16" else 4)), rel=0.05)
    assert how.met and turned.model == asked.model


def test_the_linear_family_turns_the_width_of_its_values():
    asked, turned, how = met("mixer=gated_deltanet", "match=state", "match_reference=mesa", "model=140m")
    assert turned.mixer.expand_v == pytest.approx(2, rel=0.02), "Mesa keeps a second matrix of the same size"
    assert how.knob == "mixer.expand_v" and how.met and turned.model == asked.model


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["mixer=hyena"],
            "mixer hyena cannot have .* bytes of state of match_reference=transformer: it keeps all tokens",
        ),
        (["mixer=hawk"], "its state is as wide as the layer itself"),
        (["mixer=hawk_mesa"], "its parts have states of several kinds"),
        (["mixer=transformer", "match_reference=mesa"], "a shorter window is mixer=swa"),
        (["mixer=gla", "match_len=65536"], "with mixer.expand_v=4, its largest, it has only"),
        (["mixer=swa", "match_reference=mesa", "match_len=16"], "with mixer.window=16, its largest, it has only"),
        (["mixer=gla", "match=params", "model.mlp=none"], "model.mlp=none leaves no MLP"),
        (
            ["mixer=mesa", "match=flops", "match_reference=linear", "mixer.cg_steps=3000"],
            "model.mlp_width=1, its least",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_met_is_said_with_its_reason(overrides, words):
    with pytest.raises(CannotMeet, match=words):
        met("match=state", "model=140m", *overrides)


# ---- the config ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["match=size"], "match=size: must be one of none, params, flops, state"),
        (
            ["match=params", "match_reference=transfomer"],
            "match_reference=transfomer: no such choice. Did you mean 'trans",
        ),
        (["match=params", "match_reference=null"], "match_reference=null: name the mixer"),
        (["match=params", "match_len=64"], "match_len=64: is the length at which match=state compares"),
        (["match=state", "match_len=0"], "match_len=0: must be at least 1"),
        (["match=params", "match_reference=toeplitz", "data.seq_len=64", "model.head_dim=48"], None),
    ],
    ids=str,
)
def test_the_keys_are_checked_before_anything_starts(overrides, words):
    if words is None:
        assert validate(composed(*overrides)).match_reference == "toeplitz"
        return
    with pytest.raises(ConfigError, match=words):
        validate(composed(*overrides))


def test_match_is_science_and_what_is_not_used_is_not():
    def me(*overrides: str):
        raw = composed(*overrides)
        return identify(raw, validate(raw), "swa")

    base = me("mixer=swa")
    assert me("mixer=swa", "match_reference=mesa").run_id == base.run_id
    seen = {base.comparison_key}
    for other in (["match=params"], ["match=flops"], ["match=state"], ["match=params", "match_reference=mesa"]):
        seen.add(me("mixer=swa", *other).comparison_key)
        assert me("mixer=swa", *other).comparison_key == me("mixer=gla", *other).comparison_key
    assert len(seen) == 5
    explicit = me("mixer=swa", "match=state", "match_len=256")
    assert (
        explicit.run_id
        == me("mixer=swa", "match=state").run_id
        != me("mixer=swa", "match=state", "match_len=64").run_id
    )


@pytest.mark.slow
def test_a_run_is_known_by_what_was_asked_and_trained_and_loaded_with_what_was_solved(tmp_path: Path):
    asked = ["mixer=gla", "match=params", "model.mlp_width=48", "logger=none"]
    done = train(tmp_path, *asked)
    (folder,) = folders(tmp_path)
    record = read_json(folder / "run.json")
    how = record["match"]
    assert how["met"] and how["knob"] == "model.mlp_width" and how["value"] != 48
    assert record["science"]["model"]["mlp_width"] == record["comparison"]["model.mlp_width"] == 48
    assert record["counts"]["params_non_embedding"] == how["reached"]
    assert "match=params:" in done.stdout + done.stderr
    loaded = load_run(folder)
    assert loaded.config.model.mlp_width == how["value"]
    assert loaded.model.counts(32)["params_non_embedding"] == how["reached"]
    again = train(tmp_path, *asked)
    assert "is finished: skipped" in again.stdout + again.stderr and len(folders(tmp_path)) == 1
    refused = train(tmp_path, "mixer=hyena", "match=state", "logger=none", code=1)
    assert "match=state: mixer hyena cannot have" in refused.stderr


# ---- recipes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "transformer", "mesa"),
    [
        ("mesanet_140m", 145_967_616, 146_195_368),
        ("mesanet_440m", 433_203_200, 433_924_032),
        ("mesanet_1b", 936_066_048, 937_489_568),
    ],
)
def test_the_mesanet_recipes_have_the_papers_sizes(recipe, transformer, mesa):
    for mixer, expected in (("transformer", transformer), ("mesa", mesa)):
        config = validate(composed(f"experiment={recipe}", f"mixer={mixer}"))
        assert counts(config, GPT2)["params"] == expected
        assert config.match == "none" and config.tokens_per_step == 524_288


def test_counting_makes_no_weights():
    config = validate(composed("mixer=mesa", "model=tiny"))
    assert counts(config, Shape(257)) == build_model(config, 257).counts(config.data.seq_len)
