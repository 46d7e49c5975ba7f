"""What two-pass models cost, pass by pass, and which configs cannot be."""

import dataclasses

import pytest
import torch
from omegaconf import OmegaConf
from torch.utils.flop_counter import FlopCounterMode

from models.lm import build_model
from runs.validate import ConfigError, validate
from tests.contract.test_counts import FUSED
from tests.models.test_two_pass import NANOCHAT, VARIANTS, batch_of, checked, variant

# ---- counts ------------------------------------------------------------------------------------------------------------

D20 = (
    "model.d_model=1280",
    "model.n_layers=20",
    "model.n_heads=10",
    "model.mlp=relu2",
    "model.mlp_width=5120",
    "model.norm=rms_plain",
    "model.residual_scalars=true",
    "model.tied=false",
    "model.qk_norm=true",
)


def d20(*overrides):
    config = checked(*D20, *overrides, "mixer.window=512", small=())
    with torch.device("meta"):
        return build_model(config, 32768).counts(2048)


def test_nanochat_d20_counts():
    shared, swa = d20("mixer=maglev"), d20("mixer=swa")
    assert shared["params_scaling"] == swa["params_scaling"] == 12 * 20 * 1280**2 + 32768 * 1280 == 435_159_040
    assert shared["params_injection"] == shared["params"] - swa["params"] == 3_788_800
    assert shared["params_training_only"] == 40  # the prefiller's own scalars
    # 2 d^2 + 2 L H d numbers, each a multiply-add, beside the mixing of keys and values itself
    mixing = 20 * 6 * 1280
    assert shared["flops_per_token"] - swa["flops_per_token"] == 2 * 3_788_800 + mixing
    assert shared["train_flops_decoder"] == 3 * shared["flops_per_token"]
    # The paper's arithmetic has full attention at its longest; here causal halves are taken.
    assert 1.85 < shared["train_flops_per_token"] / swa["train_flops_per_token"] < 2.05
    assert shared["state_bytes"] == swa["state_bytes"] + 4 * 1280 == 20 * 512 * 2 * 1280 * 4 + 4 * 1280
    apart = d20("mixer=maglev", "mixer.sharing=separate")
    assert apart["params_training_only"] == 12 * 20 * 1280**2 + 40
    assert {**apart, "params_training_only": 0} == {**shared, "params_training_only": 0}


@pytest.mark.parametrize("name", VARIANTS)
def test_parameter_counts_are_those_of_the_model(name):
    model = variant(name)
    counts = model.counts(100)
    assert counts["params"] + counts["params_training_only"] == sum(p.numel() for p in model.parameters())
    plain = build_model(checked("mixer=swa", *(o for o in VARIANTS[name] if o.startswith("model.")), small=()), 11)
    assert counts["params"] - counts["params_injection"] == plain.counts(100)["params"]
    assert counts["params_scaling"] == plain.counts(100)["params_scaling"]
    mixers = [block.mixer for block in model.backbone.layers]
    assert [sum(p.numel() for p in m.parameters()) for m in mixers] == [
        model.mixer.for_layer(i).n_parameters() for i in range(2)
    ]
    floating = [t for layer in model.init_state(1, 100).layers for t in layer.values() if t.is_floating_point()]
    assert counts["state_bytes"] == sum(t.numel() for t in floating) * 4 + 16 * 4


@pytest.mark.parametrize("name", VARIANTS)
def test_training_flops_agree_with_a_flop_counter(name):
    """At a width at which costs look as they do in earnest."""
    overrides = ["model.d_model=128", "model.mlp_width=256", *VARIANTS[name]]
    model = build_model(checked(*overrides, small=("mixer.window=64",)), 64)
    x = torch.randint(0, 64, (1, 128), generator=torch.Generator().manual_seed(0))
    y = torch.randint(0, 64, (1, 128), generator=torch.Generator().manual_seed(1))
    with FlopCounterMode(display=False, custom_mapping=FUSED) as counter:
        model.loss(batch_of(x, y))[0].backward()
    assert counter.get_total_flops() / 128 == pytest.approx(model.counts(128)["train_flops_per_token"], rel=0.2)
    with FlopCounterMode(display=False, custom_mapping=FUSED) as counter:
        model.deployed_features(x)
    said = model.counts(128)["flops_per_token"] - 2 * 64 * 128  # no output matrix in features
    assert counter.get_total_flops() / 128 == pytest.approx(said, rel=0.2)


# ---- configs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["mixer=maglev", "mixer.p_pattern=SLSL"], "mixer.p_pattern=SLSL: an L is full attention"),
        (["mixer=maglev", "mixer.q_pattern=SLX"], "mixer.q_pattern=SLX: must be a word of S"),
        (["mixer=maglev", "mixer.q_pattern=''"], "mixer.q_pattern="),
        (["mixer=maglev", "mixer.injection=[k,k]"], "mixer.injection"),
        (["mixer=maglev", "mixer.injection=[]"], "mixer.injection"),
        (["mixer=maglev", "mixer.injection=[cross,v]"], "leave out k and v"),
        (["mixer=maglev", "mixer.injection=[q]"], "mixer.injection=q: must be one of k, v, cross, residual"),
        (["mixer=maglev", "mixer.inject_layers=[2]"], "the layers are 0 to 1"),
        (["mixer=maglev", "mixer.source_layer=3"], "mixer.source_layer=3: must be from 1 to model.n_layers=2"),
        (["mixer=maglev", "mixer.source_layer=1", "mixer.lam=0.1"], "shrink the distance for nothing"),
        (["mixer=maglev", "mixer.subsets=2", "mixer.extra_passes=1"], "mixer.extra_passes=1"),
        (["mixer=maglev", "mixer.subsets=2", "mixer.sharing=separate"], "mixer.sharing=separate"),
        (["mixer=maglev", "mixer.training=bptt", "mixer.lam=0.1"], "mixer.lam=0.1: needs the prefiller"),
        (["mixer=maglev", "mixer.training=bptt", "mixer.prefill=q_assisted"], "mixer.prefill=q_assisted: needs"),
        (["mixer=maglev", "mixer.own_memory_prob=1.5"], "mixer.own_memory_prob=1.5"),
        (["mixer=maglev", "mixer.memory_residual=1"], "mixer.memory_residual=1.0"),
        (["mixer=maglev", "mixer.lam=-1"], "mixer.lam=-1.0: must be at least 0"),
        (["mixer=maglev", "mixer.window=0"], "mixer.window=0"),
        (["mixer=maglev", "mixer.consistency=l1"], "mixer.consistency=l1: must be one of rms"),
        (["mixer=lrt", "mixer.sharing=separate"], "mixer.sharing=separate"),
        (["mixer=hawk_mesa", "mixer@mixer.parts.mesa=maglev"], "maglev is trained in two passes"),
        (["mixer=hawk_mesa", "mixer@mixer.parts.mesa=lrt"], "lrt is trained in two passes"),
        (["mixer=maglev", "mixer.gate_input=x"], "mixer.gate_input=x: must be one of normed, raw"),
        (
            ["mixer=maglev", "mixer.source_layer=1", "mixer.lam_start=1", "mixer.lam_steps=9"],
            "mixer.lam_start=1.0: the",
        ),
        # What would have no effect.
        (
            ["mixer=maglev", "mixer.bptt_len=4"],
            "mixer.bptt_len=4: has no effect with training=two_pass; leave it at null",
        ),
        (["mixer=maglev", "mixer.prefill_passes=2"], "mixer.prefill_passes=2: has no effect with prefill=recurrent"),
        (
            ["mixer=maglev", "mixer.lam_start=0.5"],
            "mixer.lam_start=0.5: has no effect with lam_steps=0; leave it at 0.0",
        ),
        (
            ["mixer=maglev", "mixer.injection=[k]", "mixer.gates_for=separate_kv"],
            "mixer.gates_for=separate_kv: has no effect with injection=[k], which has not both k and v; leave it at both",
        ),
        (["mixer=lrt", "mixer.sep_resid=false"], "mixer.sep_resid=False: has no effect with kind=lrt"),
        (["mixer=lrt", "mixer.sep_x0=false"], "mixer.sep_x0=False: has no effect with kind=lrt"),
        (["mixer=maglev", "mixer.sharing=separate", "mixer.sep_x0=false"], "has no effect with sharing=separate"),
        (["mixer=maglev", "mixer.training=bptt", "mixer.detach=target"], "has no effect with training=bptt"),
        (["mixer=maglev", "mixer.lam=0", "mixer.detach=target"], "mixer.detach=target: has no effect with lam=0"),
        (
            ["mixer=maglev", "mixer.lam=0.5", "mixer.lam_start=0.5", "mixer.lam_steps=9"],
            "mixer.lam_steps=9: has no effect with lam_start=lam=0.5; leave it at 0",
        ),
        (["mixer=maglev", "mixer.injection=[residual]", "mixer.gate_shape=element"], "with injection=[residual]"),
        (["mixer=maglev", "mixer.injection=[v]", "mixer.rec_key_norm=full"], "injection=[v], which has no key"),
        (["mixer=maglev", "mixer.residual_init=0.2"], "injection=[k,v], which has no residual; leave it at 0.1"),
        (["mixer=maglev", "mixer.mix_order=lrt"], "mixer.mix_order=lrt: has no effect with model.qk_norm=false"),
    ],
)
def test_what_cannot_be_is_refused_by_its_key(overrides, message):
    with pytest.raises(ConfigError) as error:
        checked(*overrides, small=())
    assert message in str(error.value) and "\n" not in str(error.value)


def test_defaults_follow_the_paper():
    assert checked("mixer=maglev").mixer.lam == 0.1
    assert checked("mixer=maglev", "mixer.sharing=separate").mixer.lam == 1.0
    lrt = checked("mixer=lrt", "mixer.subsets=4").mixer
    assert (lrt.lam, lrt.q_ce_weight) == (0.0, 0.25)
    # A memory without a norm is not drawn together, whatever the sharing.
    assert checked("mixer=maglev", "mixer.source_layer=1").mixer.lam == 0
    assert checked("mixer=lrt", "mixer.p_pattern=SL").mixer.q_pattern == "SL"


@pytest.mark.parametrize("name", VARIANTS)
def test_a_runs_own_config_can_be_opened_again(name):
    """It is kept as it was after its checks, and evaluation and generation check it once more."""
    config = checked(*VARIANTS[name])
    assert validate(OmegaConf.create(dataclasses.asdict(config))) == config


def test_the_order_of_injections_says_nothing():
    one, other = (checked("mixer=maglev", f"mixer.injection={words}") for words in ("[k,v,residual]", "[residual,v,k]"))
    assert one == other


def test_a_prefiller_that_reads_prompts_is_deployed():
    plain, own, assisted = (
        build_model(checked("mixer=maglev", *NANOCHAT, *more), 11).counts(100)
        for more in ([], ["mixer.sharing=separate"], ["mixer.sharing=separate", "mixer.prefill=q_assisted"])
    )
    dropped = own["params_training_only"]
    assert dropped > 0 == assisted["params_training_only"]
    for key in ("params", "params_non_embedding"):
        assert own[key] == plain[key] and assisted[key] == own[key] + dropped
    assert assisted["train_flops_per_token"] == own["train_flops_per_token"]
    shared = build_model(checked("mixer=maglev", *NANOCHAT, "mixer.prefill=q_assisted"), 11).counts(100)
    assert shared["params"] == plain["params"] + 4, "the prefiller's two scalars in each of two layers"
