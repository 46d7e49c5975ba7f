"""Muon against its definition, the groups of its parameters, and what is a function of the step."""

import io

import pytest
import torch

from models import muon
from models.config import Optimizer
from models.muon import MARGIN, POLAR_EXPRESS, MuonAdamW, polar
from models.optim import group_counts, make_optimizer, muon_groups, parameter_groups, set_ramps
from runs.validate import ConfigError
from tests.contract.cases import HYBRIDS, NAMES, close, language_model
from tests.models.test_two_pass import checked

SHAPES = [(8, 20), (20, 8), (12, 12), (1, 9), (9, 1)]
NEWTON_SCHULZ = ((3.4445, -4.7750, 2.0315),) * 5  # of torch.optim.Muon


def matrix(rows, columns, seed=0):
    return torch.randn(rows, columns, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def config(**settings) -> Optimizer:
    return checked("optimizer=muon", *(f"optimizer.{k}={v}" for k, v in settings.items()), small=()).optimizer


# ---- the orthogonal factor -------------------------------------------------------------------------------------------


def factor_by_svd(g, coefficients=POLAR_EXPRESS, margin=MARGIN):
    """U p(S) V^T: an odd polynomial of a matrix acts on its singular values."""
    u, s, v = torch.linalg.svd(g, full_matrices=False)
    s = s / (s.square().sum().sqrt() * margin + 1e-6)
    for a, b, c in coefficients:
        s = a * s + b * s**3 + c * s**5
    return u @ torch.diag(s) @ v


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_polynomials_act_on_the_singular_values(shape):
    g = matrix(*shape)
    close(polar(g), factor_by_svd(g), 1e-12)
    close(polar(g, POLAR_EXPRESS[:2]), factor_by_svd(g, POLAR_EXPRESS[:2]), 1e-12)
    close(polar(64 * g), polar(g), 1e-4)  # the size of a gradient does not count, up to the 1e-6 beside its norm
    close(polar(g.float()).double(), polar(g), 1e-5)
    close(polar(g.bfloat16()).double(), polar(g), 0.15)  # 8 bits, fifteen products, and slopes up to 20


@pytest.mark.parametrize("smallest", [1.0, 0.1, 0.01, 0.005])
def test_five_steps_end_near_the_orthogonal_matrix(smallest):
    """Singular values down to 2 thousandths of the norm come within 14.2 % of 1, which is what these polynomials are made
    for; those of torch's Muon leave 0.68 to 1.20."""
    u, v = (torch.linalg.qr(matrix(24, 24, seed))[0] for seed in (1, 2))
    s = smallest ** torch.linspace(0, 1, 24, dtype=torch.float64)
    s /= s.square().sum().sqrt()
    assert s.min() > 0.002
    reached = torch.linalg.svdvals(polar(u @ torch.diag(s) @ v))
    assert reached.min() > 0.858 and reached.max() < 1.142
    close(polar(u @ torch.diag(s) @ v), u @ v, 0.142)


# ---- the update ------------------------------------------------------------------------------------------------------


def step_by_definition(w, g, state, *, lr, momentum, decay, beta, cautious):
    """One map: the formulas of `models/muon.py`, number by number."""
    rows, columns = w.shape
    m = state["m"] = momentum * state.get("m", torch.zeros_like(w)) + (1 - momentum) * g
    o = factor_by_svd((1 - momentum) * g + momentum * m)
    before = o.square().sum().sqrt()
    by_row = rows >= columns
    lines = o if by_row else o.T
    v = state.setdefault("v", [0.0] * len(lines))
    for i, line in enumerate(lines):
        v[i] = beta * v[i] + (1 - beta) * float(line.square().mean())
    lines = torch.stack([line / max(v[i], 1e-10) ** 0.5 for i, line in enumerate(lines)])
    o = lines if by_row else lines.T
    o = o * before / o.square().sum().sqrt()
    eta = lr * max(1.0, rows / columns) ** 0.5
    out = w.clone()
    for i in range(rows):
        for j in range(columns):
            shrinks = not cautious or float(o[i, j] * w[i, j]) >= 0
            out[i, j] = w[i, j] - eta * o[i, j] - eta * decay * shrinks * w[i, j]
    return out


@pytest.mark.parametrize("cautious", [True, False])
@pytest.mark.parametrize(("shape", "parts"), [((6, 15), (6,)), ((15, 6), (15,)), ((15, 6), (4, 4, 7))], ids=str)
def test_steps_equal_the_definition(shape, parts, cautious):
    w = torch.nn.Parameter(matrix(*shape, 9))
    settings = {"momentum": 0.9, "weight_decay": 0.3, "variance_beta": 0.8, "cautious": cautious, "steps": 5, "lr": 0.1}
    optimizer = MuonAdamW([{"kind": "muon", "params": [w], "parts": [parts], **settings}])
    wanted, states = w.detach().clone(), [{} for _ in parts]
    for step in range(4):
        g = w.grad = matrix(*shape, step)
        optimizer.param_groups[0]["momentum"] = momentum = 0.85 + 0.03 * step
        optimizer.step()
        wanted = torch.cat(
            [
                step_by_definition(a, b, s, lr=0.1, momentum=momentum, decay=0.3, beta=0.8, cautious=cautious)
                for a, b, s in zip(wanted.split(parts), g.split(parts), states, strict=True)
            ]
        )
        close(w, wanted, 1e-9)


def test_without_its_extras_it_is_torchs_muon(monkeypatch):
    """Which computes in bf16, with the polynomial of Newton-Schulz."""
    monkeypatch.setattr(muon, "polar", lambda x, _: polar(x, NEWTON_SCHULZ, margin=1.0))
    ours, theirs = (torch.nn.Parameter(matrix(40, 16, 9).float()) for _ in range(2))
    plain = {"momentum": 0.9, "weight_decay": 0.3, "variance_beta": None, "cautious": False, "steps": 5, "lr": 0.1}
    optimizers = (
        MuonAdamW([{"kind": "muon", "params": [ours], "parts": [(40,)], **plain}], torch.bfloat16),
        torch.optim.Muon([theirs], lr=0.1, momentum=0.9, weight_decay=0.3),
    )
    before = ours.detach().clone()
    for step in range(3):
        for optimizer, w in zip(optimizers, (ours, theirs), strict=True):
            w.grad = matrix(40, 16, step).float()
            optimizer.step()
    # They round at different places, and torch scales the learning rate of the update alone by sqrt(rows / columns).
    close(ours - before, theirs - before + 0.1 * 0.3 * 3 * (1 - (40 / 16) ** 0.5) * before, 0.03)


def test_adamw_groups_are_torchs_adamw():
    ours, theirs = ([torch.nn.Parameter(matrix(5, 3, i)), torch.nn.Parameter(matrix(1, 4, i)[0])] for i in (7, 7))
    settings = {"betas": (0.8, 0.95), "eps": 1e-10}
    first, second = ({"lr": 0.3, "weight_decay": 0.0}, {"lr": 0.1, "weight_decay": 0.2})
    a = MuonAdamW(
        [{"kind": "adamw", "params": [p], **settings, **g} for p, g in zip(ours, (first, second), strict=True)]
    )
    b = torch.optim.AdamW([{"params": [p], **settings, **g} for p, g in zip(theirs, (first, second), strict=True)])
    for step in range(4):
        for p in (*ours, *theirs):
            p.grad = matrix(*(p.shape if p.ndim == 2 else (1, 4)), step).view(p.shape)
        a.step()
        b.step()
    for p, q in zip(ours, theirs, strict=True):
        close(p, q, 1e-12)


def test_no_gradient_and_a_zero_gradient():
    """nanochat's output projections start at zero, so most of the first step's gradients are."""
    still, zero = (torch.nn.Parameter(matrix(6, 4, seed)) for seed in (1, 2))
    before, zero.grad = zero.detach().clone(), torch.zeros(6, 4, dtype=torch.float64)
    settings = {"momentum": 0.9, "weight_decay": 0.5, "variance_beta": 0.95, "cautious": True, "steps": 5, "lr": 0.1}
    optimizer = MuonAdamW([{"kind": "muon", "params": [still, zero], "parts": [(6,), (6,)], **settings}])
    optimizer.step()
    assert torch.equal(still, matrix(6, 4, 1)) and still not in optimizer.state
    close(zero, before * (1 - 0.1 * (6 / 4) ** 0.5 * 0.5), 1e-12)


# ---- groups and ramps ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES + HYBRIDS)
def test_every_parameter_is_in_one_group_and_only_maps_between_features_are_muons(name):
    model = language_model(name)
    groups = muon_groups(model)
    assert sorted(key for group in groups.values() for key in group) == sorted(dict(model.named_parameters()))
    assert list(groups["embedding"]) == ["backbone.embed.weight"] and "head" not in groups  # tied
    modules = dict(model.named_modules())
    for key in groups["hidden"]:
        assert isinstance(modules[key.rpartition(".")[0]], torch.nn.Linear) and key.endswith(".weight"), key
    for i, block in enumerate(model.backbone.layers):
        for marked in block.mixer.no_decay():
            assert f"backbone.blocks.{i}.mixer.{marked}" in groups["other"]
    optimizer = make_optimizer(model, config())
    (hidden,) = (group for group in optimizer.param_groups if group["kind"] == "muon")
    assert [sum(parts) for parts in hidden["parts"]] == [len(p) for p in hidden["params"]]
    assert group_counts(model, config()) == {g: sum(p.numel() for p in v.values()) for g, v in groups.items()}


def test_fused_projections_are_told_apart():
    model = language_model("transformer")
    optimizer = make_optimizer(model, config())
    (hidden,) = (group for group in optimizer.param_groups if group["kind"] == "muon")
    parts = dict(zip(muon_groups(model)["hidden"], hidden["parts"], strict=True))
    assert parts["backbone.blocks.0.mixer.qkv.weight"] == (16, 16, 16)  # q, k, v
    assert parts["backbone.blocks.0.mlp.up.weight"] == (24, 24)  # the two branches of SwiGLU
    assert parts["backbone.blocks.0.mlp.down.weight"] == (16,)


def test_rates_are_each_groups_own_and_scale_with_the_model():
    model = language_model("transformer")  # 16 wide, two layers
    rates = {group["name"]: group["lr"] for group in make_optimizer(model, config()).param_groups}
    assert rates == {"hidden": 0.02, "embedding": pytest.approx(0.3 * 48**0.5), "other": 0.005}
    optimizer = make_optimizer(model, config(tuned_width="null", tuned_depth="null", other_lr=0.01))
    assert {group["name"]: group["lr"] for group in optimizer.param_groups} == {
        "hidden": 0.02,
        "embedding": 0.3,
        "other": 0.01,
    }
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.2, 0, 0]
    assert make_optimizer(model, config()).param_groups[0]["weight_decay"] == pytest.approx(0.2 * (12 / 2) ** 2)


def test_ramps_are_straight_lines_in_the_step():
    settings = config(tuned_depth="null")
    optimizer = make_optimizer(language_model("transformer"), settings)

    def at(step):
        set_ramps(optimizer, settings, step, 1000)
        hidden, *rest = optimizer.param_groups
        assert all(group["weight_decay"] == 0 for group in rest)
        return hidden["momentum"], hidden["weight_decay"]

    values = {0: (0.85, 0.2), 150: (0.90, 0.17), 300: (0.95, 0.14), 999: (0.95, 0.0002), 500: (0.95, 0.1)}
    for step, wanted in values.items():  # in any order: nothing is remembered
        assert at(step) == pytest.approx(wanted)
    constant = config(weight_decay_final=1.0, momentum_steps=0)
    set_ramps(optimizer, constant, 700, 1000)
    assert (optimizer.param_groups[0]["momentum"], optimizer.param_groups[0]["weight_decay"]) == (0.95, 0.2)


def test_a_loaded_optimizer_goes_on_bit_by_bit():
    settings = config()
    model, other = language_model("maglev"), language_model("maglev", seed=1)
    one, two = make_optimizer(model, settings), make_optimizer(other, settings)

    def steps(model, optimizer, begin, end):
        for step in range(begin, end):
            set_ramps(optimizer, settings, step, 6)
            for i, p in enumerate(model.parameters()):
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * step + i))
            optimizer.step()

    steps(model, one, 0, 3)
    file = io.BytesIO()
    torch.save((model.state_dict(), one.state_dict()), file)
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    other.load_state_dict(weights)
    two.load_state_dict(state)
    steps(model, one, 3, 6)
    steps(other, two, 3, 6)
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q), name


# ---- configs ---------------------------------------------------------------------------------------------------------


def test_adamw_alone_has_its_two_groups():
    model = language_model("swa")
    assert list(parameter_groups(model, checked(small=()).optimizer)) == ["decayed", "not decayed"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["optimizer.kind=lion"], "optimizer.kind=lion: must be one of adamw, muon"),
        (["optimizer.kind=muon"], "optimizer.momentum=null: kind=muon needs it"),
        (["+optimizer.momentum=0.9"], "optimizer.momentum=0.9: is of kind=muon"),
        (["optimizer=muon", "optimizer.momentum=1"], "optimizer.momentum=1.0: must be in [0, 1)"),
        (["optimizer=muon", "optimizer.polar_steps=6"], "optimizer.polar_steps=6: must be from 1 to 5"),
        (["optimizer=muon", "optimizer.weight_decay_final=2"], "optimizer.weight_decay_final=2.0: must be in [0, 1]"),
        (["optimizer=muon", "optimizer.embedding_lr=0"], "optimizer.embedding_lr=0.0: must be above 0"),
        (["optimizer=muon", "optimizer.head_lr=null"], "optimizer.head_lr=null: kind=muon needs it"),
        (["optimizer=muon", "optimizer.input_betas=[1,0]"], "optimizer.input_betas=[1.0, 0.0]: must be two numbers"),
        (["optimizer=muon", "optimizer.tuned_width=0"], "optimizer.tuned_width=0: must be at least 1"),
        (["optimizer=muon", "trainer=fsdp"], "optimizer.kind=muon: needs whole matrices"),
    ],
)
def test_what_cannot_be_is_refused_by_its_key(overrides, message):
    with pytest.raises(ConfigError) as error:
        checked(*overrides, small=())
    assert message in str(error.value) and "\n" not in str(error.value)
