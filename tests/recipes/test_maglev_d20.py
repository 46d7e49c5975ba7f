"""`experiment=maglev_d20` and its study: the paper's counts at full size, three real steps at reduced width."""

import json
import math

import pytest
import torch
import yaml
from omegaconf import OmegaConf

from models.lm import build_model, model_for
from models.optim import group_counts, make_optimizer
from runs import identity
from runs.fit import fit
from runs.folder import RunFolder
from runs.host import set_threads
from runs.load import open_data
from runs.validate import ConfigError, validate
from runs.wandb_sink import NoSink
from sweeps.plan import main as plan
from tests.recipes.common import REDUCED, ROOT, checked, composed

VOCABULARY = 32768
MATRICES, TABLE = 12 * 20 * 1280**2, VOCABULARY * 1280  # of the blocks; of one embedding
VALUE_GATES = 20 * 10 * 32
ROWS = {
    "transformer_slsl": ("slsl", "mixer.parts.S.window=512"),
    "lrt_slsl": ("lrt", "mixer.window=512", "mixer.p_pattern=SLSL"),
    "swa": ("swa", "mixer.window=512"),
    "lrt_ssss": ("lrt", "mixer.window=512", "mixer.p_pattern=SSSS"),
    "maglev_shared_0.1": ("maglev", "mixer.window=512", "mixer.lam=0.1"),
    "maglev_shared_1": ("maglev", "mixer.window=512", "mixer.lam=1"),
    "maglev_separate_0.1": ("maglev", "mixer.window=512", "mixer.sharing=separate", "mixer.lam=0.1"),
    "maglev_separate_1": ("maglev", "mixer.window=512", "mixer.sharing=separate", "mixer.lam=1"),
}


def recipe(row, *overrides):
    mixer, *fields = ROWS[row]
    return checked("experiment=maglev_d20", f"mixer={mixer}", *fields, *overrides)


def full_size(config):
    """A model that holds no numbers."""
    with torch.device("meta"):
        return build_model(config, VOCABULARY)


def test_budget_and_data_are_the_papers():
    config = recipe("swa")
    assert (config.steps, config.tokens_per_step) == (83_000, 2**19)
    assert config.steps * config.tokens_per_step == pytest.approx(43.52e9, rel=1e-3)
    assert (config.data.name, config.data.packing, config.data.seq_len) == ("fineweb_edu_100bt", "best_fit", 2048)
    assert config.tokenizer.vocab_size == VOCABULARY
    assert (config.precision, config.optimizer.clip, config.match) == ("bf16", None, "none")
    assert config.model.head_dim == 128 and config.model.mlp_width == 5120
    schedule = config.schedule  # three steps of a golden run cannot tell these numbers from others
    assert (schedule.kind, schedule.warmup_steps, schedule.decay_fraction, schedule.final) == ("trapezoid", 0, 0.5, 0.0)


@pytest.mark.parametrize("row", ROWS)
def test_parameters_and_optimizer_groups_at_full_size(row):
    config = recipe(row)
    model = full_size(config)
    counts, groups = model.counts(2048, torch.bfloat16), group_counts(model, config.optimizer)
    two_pass, separate = not row.startswith(("swa", "transformer")), "separate" in row
    prefiller = MATRICES + VALUE_GATES if separate else 0
    scalars = 40 if "maglev" in row else 0  # the prefiller's own, of separate blocks or of shared ones
    assert counts["params_scaling"] == MATRICES + TABLE == 435_159_040
    assert counts["params"] == MATRICES + 22 * TABLE + VALUE_GATES + 40 + 3_788_800 * two_pass
    assert counts["params"] == pytest.approx(1.316e9, rel=4e-3)
    assert counts["params_training_only"] == prefiller + scalars
    gates = 20 * 2 * 10 * 1280 if two_pass else 0  # LRT and Maglev: with AdamW's other scalars
    assert groups == {
        "hidden": MATRICES + VALUE_GATES + prefiller + 2 * 1280**2 * two_pass,
        "embedding": TABLE,
        "value": 20 * TABLE,
        "head": TABLE,
        "keep": 20 + scalars // 2,
        "input": 20 + scalars // 2,
        **({"other": gates} if two_pass else {}),
    }
    if row == "swa" or "ssss" in row or "maglev" in row:
        memory = 2 * 1280 if two_pass else 0
        assert counts["state_bytes"] == 50 * 2**20 + memory  # 50 MiB in bf16, whatever the length
        assert model.counts(8192, torch.bfloat16)["state_bytes"] == counts["state_bytes"]


def test_value_embeddings_of_every_other_layer_give_nanochats_own_total():
    model = full_size(recipe("swa", "model.value_embeds=alternate"))
    assert model.counts(2048)["params"] == MATRICES + 12 * TABLE + VALUE_GATES // 2 + 40
    assert model.counts(2048)["params"] == pytest.approx(0.897e9, rel=1e-3)


def test_training_flops_are_the_papers_up_to_causal_halves():
    """It takes each window as full: 2.77e9 for SWA, 3.00e9 for SLSL, and Maglev twice SWA (maglev 3.3)."""
    flops = {row: full_size(recipe(row)).counts(2048)["train_flops_per_token"] for row in ROWS}
    assert flops["swa"] == pytest.approx(2.77e9, rel=0.01)
    assert flops["transformer_slsl"] == pytest.approx(3.00e9, rel=0.06)
    for row in ROWS:
        if "maglev" in row:
            assert flops[row] == pytest.approx(5.54e9, rel=0.04)


def test_rates_of_every_group():
    """LRT's appendix (maglev 7.4), scaled to the width and the depth."""
    config = recipe("maglev_shared_0.1")
    groups = {group["name"]: group for group in make_optimizer(full_size(config), config.optimizer).param_groups}
    assert {name: group["lr"] for name, group in groups.items()} == {
        "hidden": 0.02,
        "embedding": pytest.approx(0.232, abs=5e-4),
        "value": pytest.approx(0.232, abs=5e-4),
        "head": pytest.approx(0.0031, abs=5e-5),
        "keep": 0.005,
        "input": 0.5,
        "other": 0.005,
    }
    assert groups["hidden"]["weight_decay"] == pytest.approx(0.072)
    assert all(group["weight_decay"] == 0 for name, group in groups.items() if name != "hidden")
    assert groups["embedding"]["betas"] == (0.8, 0.95) and groups["input"]["betas"] == (0.96, 0.95)


# ---- at reduced width ------------------------------------------------------------------------------------------------

LITTLE = ("schedule.warmup_steps=0", "optimizer.tuned_width=null", "optimizer.tuned_depth=null", "logger=none")
"""The recipe has no warm-up. Its rates and weight decay are not scaled up to a model as narrow and shallow as this one."""

# Training loss of three steps, then the deployed model's validation loss, in float64 and on one thread. A first step of
# AdamW follows the signs of gradients, and Muon's fills in their small directions, so in float32 the order in which a
# kernel adds moves these by 3e-3. In float64 generic, AVX2 and AVX-512 kernels agree to 2e-8 (the weights are drawn in
# float32). The ramps move these losses too little (a starting momentum of 0.86: 3e-8): test_muon.py guards them.
SPREAD = 1e-7
GOLDEN = {
    "transformer_slsl": [5.5495505, 5.49288715, 5.37685962, 5.38586719],
    "lrt_slsl": [5.5495505, 5.49268735, 5.37667681, 5.38540356],
    "swa": [5.5495505, 5.49302139, 5.37726838, 5.38631907],
    "lrt_ssss": [5.5495505, 5.49274521, 5.37669367, 5.38537045],
    "maglev_shared_0.1": [5.5495505, 5.49285879, 5.37935903, 5.38879181],
    "maglev_shared_1": [5.5495505, 5.49285879, 5.40264491, 5.41190659],
    "maglev_separate_0.1": [5.5495505, 5.49293625, 5.38077729, 5.3901058],
    "maglev_separate_1": [5.5495505, 5.49293625, 5.41303303, 5.42256883],
}


class Started:
    """A run of the recipe at reduced width, in float64."""

    def __init__(self, results, row, *more):
        mixer, *fields = ROWS[row]
        fields = [field.replace("512", "16") for field in fields]
        words = ("experiment=maglev_d20", f"mixer={mixer}", *REDUCED, *LITTLE, *fields, *more)
        cfg = composed(*words, f"paths.results={results}")
        self.config = validate(cfg)
        set_threads(self.config)
        self.me, self.data = identity.identify(cfg, self.config, mixer), open_data(self.config)
        self.folder = RunFolder(self.me.folder)
        self.me.folder.mkdir(parents=True)

    def trained(self, checkpoint=None):
        """The model after its steps, from a checkpoint or from the start."""
        model = model_for(self.config, self.data).double()
        fit(self.config, model, self.data, me=self.me, checkpoint=checkpoint, folder=self.folder, sink=NoSink())
        return model


@pytest.mark.parametrize("row", ROWS)
def test_losses_of_the_first_steps(row, tmp_path):
    run = Started(tmp_path, row)
    run.trained()
    losses = [values[key] for key in ("train/loss", "val/loss") for values in run.folder.rows() if key in values]
    assert losses == pytest.approx(GOLDEN[row], abs=SPREAD, rel=0)
    assert losses[0] == pytest.approx(math.log(257), abs=0.01)  # the output matrix starts small


def test_a_run_goes_on_bit_by_bit_from_its_checkpoint(tmp_path):
    """Momentum, its ramp, that of weight decay, and the moving means of squares."""
    run = Started(tmp_path, "maglev_separate_1", "steps=6", "trainer.keep_every=3", "optimizer.momentum_steps=5")
    whole = run.trained().state_dict()
    (checkpoint,) = (run.me.folder / "checkpoints").glob("*3.ckpt")
    resumed = run.trained(checkpoint).state_dict()
    for name, value in whole.items():
        assert torch.equal(value, resumed[name]), name


# ---- the study -------------------------------------------------------------------------------------------------------


def test_rows_of_the_study_are_those_of_these_tests():
    """Sizes and FLOPs do not show lambda."""
    rows = OmegaConf.to_container(OmegaConf.load(ROOT / "sweeps" / "maglev_d20.yaml"))["mixers"]
    for name, (mixer, *fields) in ROWS.items():
        fields_of = {key: [yaml.safe_load(value)] for key, value in (field.split("=") for field in fields)}
        if "shared" in name:
            fields_of["mixer.sharing"] = ["shared"]  # said there, though it is what Maglev has
        assert {"mixer": name, **rows[name]} == {"mixer": mixer, **fields_of}


def test_study_has_the_eight_rows_of_the_table(capsys):
    assert plan(["study=maglev_d20", "--no-memory", "--json"]) == 0
    rows = {row["mixer"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert list(rows) == list(ROWS)
    for name, row in rows.items():
        assert row["tokens"] == 83_000 * 2**19 and row["runs"] == 1
        counts = full_size(recipe(name)).counts(2048, torch.bfloat16)
        for key in ("params", "params_training_only", "train_flops_per_token", "state_bytes"):
            assert row[key] == counts[key], (name, key)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["mixer=mamba2"],
            "model.value_embeds=all: is added to the values of attention, which mixer mamba2 does not have",
        ),
        (["mixer=maglev", "mixer.p_pattern=SLSL"], "mixer.p_pattern=SLSL: an L is full attention"),
        (["mixer=swa", "trainer=fsdp"], "optimizer.kind=muon: needs whole matrices"),
        (["mixer=swa", "optimizer.polar_steps=9"], "optimizer.polar_steps=9: must be from 1 to 5"),
    ],
)
def test_what_the_recipe_cannot_be_is_said(overrides, message):
    with pytest.raises(ConfigError) as error:
        checked("experiment=maglev_d20", *overrides)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_other_mixers_run_in_it_without_value_embeddings():
    config = checked("experiment=maglev_d20", "mixer=gated_deltanet", "model.value_embeds=none")
    groups = group_counts(full_size(config), config.optimizer)
    assert "value" not in groups and groups["other"] > 0
