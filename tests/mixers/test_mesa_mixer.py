"""The Mesa layer's switches do what they say; its ancestor is unstable where it is said to be."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from mixers.gla import GatedLinearAttentionConfig
from mixers.mesa import MesaConfig
from mixers.mesa_rls import MesaRlsConfig
from models.diagnostics import diagnose
from tests.contract.cases import close, inputs, language_model

SIZE = {"d_model": 16, "n_heads": 2, "head_dim": 8}


def layer(config, seed=0, dtype=torch.float64):
    """Random weights of unit scale, then the layer's own init."""
    built = config.build(0, 1)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.normal_(0, 0.5, generator=generator)
        if built.norm is not None:
            built.norm.weight.fill_(1.0)
    built.init_parameters(generator)
    return built.to(dtype)


def test_parameters_by_the_papers_rule():
    """4 d^2, two gates, convolution of 4 taps on q and k, one head norm, Lambda."""
    d, n_heads, width = 1024, 8, 128
    config = MesaConfig(d_model=d, n_heads=n_heads, head_dim=width)
    assert config.n_parameters() == 4 * d * d + 2 * (d * n_heads + n_heads) + 8 * d + width + d


def test_published_sizes_of_the_mesanet_models():
    """Totals for the 140M, 440M and 940M models with Mesa layers (GPT-2 tokens, tied, MLP width 3 d)."""
    for n_layers, heads, total in ((14, 6, 146_195_368), (28, 8, 433_924_032), (28, 12, 937_489_568)):
        d = heads * 128
        mixer = MesaConfig(d_model=d, n_heads=heads, head_dim=128).n_parameters()
        ours = n_layers * (mixer + 9 * d * d + 2 * d) + 50257 * d + d
        # Head norms are counted per head there and shared here: at most d a layer apart.
        assert abs(ours - total) <= n_layers * d


def test_flops_of_a_solver_step():
    """65.5 kFLOP a head, token and step at K = 128 and C = 64."""
    one, two = (
        MesaConfig(d_model=128, n_heads=1, head_dim=128, cg_steps=n).build(0, 1).cell_flops_per_token(2048)
        for n in (10, 11)
    )
    assert two - one == 2 * 128**2 + 4 * 64 * 128 == 65536


def test_lambda_starts_where_it_should_and_is_not_decayed():
    built = layer(MesaConfig(**SIZE, lambda_init=2.0))
    close(built.ridge(), torch.full((2, 8), 2.0), 1e-6)
    assert "theta_HK" in built.no_decay()
    fixed = layer(MesaConfig(**SIZE, learn_lambda=False, lambda_init=2.0))
    close(fixed.ridge(), torch.full((2, 8), 2.0), 1e-6)
    assert "theta_HK" not in dict(fixed.named_parameters())


def test_no_solver_steps_is_gated_linear_attention():
    mesa = layer(MesaConfig(**SIZE, cg_steps=0, gamma_bound=1.0))
    gla = layer(GatedLinearAttentionConfig(**SIZE))
    weights = {key: value for key, value in mesa.state_dict().items() if key != "theta_HK"}
    gla.load_state_dict(weights)
    mesa.norm, gla.norm = None, None  # they differ by a constant, 1 / sqrt(K)
    x = inputs(2, 70)
    close(mesa(x)[0], 8**0.5 * gla(x)[0], 1e-10)


@pytest.mark.parametrize(
    "change",
    [
        {"decay_gate": False},
        {"input_gate": False},
        {"gamma_bound": 0.9},
        {"signed_gamma": True},
        {"conv_on": "none"},
        {"qk_norm": "none"},
        {"head_norm": "none"},
        {"cg_steps": 1},
        {"lambda_init": 5.0},
        {"tol": 1e-1},
    ],
    ids=str,
)
def test_every_switch_changes_the_function(change):
    x = inputs(2, 70)
    base, changed = (layer(MesaConfig(**{**SIZE, **c})) for c in ({}, change))
    shared = {k: v for k, v in base.state_dict().items() if k in changed.state_dict() and k not in ("theta_HK",)}
    shared = {k: v for k, v in shared.items() if v.shape == changed.state_dict()[k].shape}
    changed.load_state_dict(shared, strict=False)
    assert not torch.allclose(base(x)[0], changed(x)[0], rtol=1e-3, atol=1e-4)


def test_gamma_correction_is_the_papers():
    """gamma (1 - 0.0025 beta^2), by the layer's own gates."""
    built = layer(MesaConfig(**SIZE))
    gates = torch.randn(2, 5, 2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    q = torch.zeros(2, 5, 2, 8, dtype=torch.float64)
    _, _, _, beta, g, _, _ = built._inputs(q, q, q, gates)
    gamma = gates[:, :, 0].sigmoid()
    close(g.exp(), gamma * (1 - (1 - 0.9975) * beta**2), 1e-12)
    close(beta, gates[:, :, 1].sigmoid(), 1e-12)


def test_signed_gamma_turns_the_value_memory():
    """Against the recurrence with gamma in (-1, 1) for G and |gamma| for H, token by token."""
    built = layer(MesaConfig(**SIZE, signed_gamma=True, gamma_bound=1.0, conv_on="none", head_norm="none"))
    x = inputs(1, 9)
    with torch.no_grad():
        q, k, v = (built.qkv(x)[0].view(9, 3, 2, 8)).unbind(1)
        q, k = (y * (y.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for y in (q, k))
        decay, beta = built.gate(x)[0].view(9, 2, 2).unbind(1)
        gamma, beta = 2 * decay.sigmoid() - 1, beta.sigmoid()
        assert (gamma < 0).any() and (gamma > 0).any()
        memory, h = torch.zeros(2, 8, 8, dtype=x.dtype), torch.zeros(2, 8, 8, dtype=x.dtype)
        rows = []
        for t in range(9):
            memory = gamma[t, :, None, None] * memory + beta[t, :, None, None] * k[t, :, :, None] * v[t, :, None]
            h = gamma[t].abs()[:, None, None] * h + beta[t, :, None, None] * k[t, :, :, None] * k[t, :, None]
            solution = torch.linalg.solve(h + torch.diag_embed(built.ridge()), q[t])
            rows.append((solution[:, None] @ memory).flatten())
        close(built(x)[0][0], built.out(torch.stack(rows)), 1e-10)
        state, parts = built.init_state(1, 9, x.device, x.dtype), []
        for a, b in ((0, 4), (4, 5), (5, 9)):
            y, state = built(x[:, a:b], state)
            parts.append(y)
        close(torch.cat(parts, dim=1), built(x)[0], 1e-10)


def test_evaluation_may_solve_otherwise():
    built = layer(MesaConfig(**SIZE, cg_steps=1, eval_cg_steps=30))
    exact = layer(MesaConfig(**SIZE, cg_steps=30))
    exact.load_state_dict(built.state_dict())
    x = inputs(2, 70)
    close(built.eval()(x)[0], exact(x)[0], 1e-10)
    assert not torch.allclose(built.train()(x)[0], exact(x)[0], rtol=1e-3)
    tolerant = layer(MesaConfig(**SIZE, eval_tol=0.5)).eval()
    tolerant.load_state_dict(built.state_dict())
    assert not torch.allclose(tolerant(x)[0], exact(x)[0], rtol=1e-4)


def test_solvers_agree():
    plain, better = layer(MesaConfig(**SIZE)), layer(MesaConfig(**SIZE, solver="pcg"))
    close(better(inputs(2, 130))[0], plain(inputs(2, 130))[0], 1e-10)


@pytest.mark.parametrize(
    "change, key",
    [
        ({"solver": "lu"}, "solver"),
        ({"cg_steps": -1}, "cg_steps"),
        ({"eval_tol": 2.0}, "eval_tol"),
        ({"gamma_bound": 0.0}, "gamma_bound"),
        ({"lambda_init": 0.1}, "lambda_init"),
        ({"signed_gamma": True, "decay_gate": False}, "signed_gamma"),
    ],
    ids=str,
)
def test_bad_values_are_named(change, key):
    with pytest.raises(ValueError, match=f"mixer.{key}="):
        MesaConfig(**SIZE, **change).check("mixer")


# ---- the original layer ----


def test_recursive_least_squares_is_mesa_without_forgetting():
    """R is the inverse of H + Lambda: the sequential layer and the parallel one are one function."""
    rls = layer(MesaRlsConfig(**SIZE))
    mesa = layer(MesaConfig(**SIZE, decay_gate=False, cg_steps=60))
    mesa.load_state_dict(rls.state_dict())
    close(rls(inputs(2, 70))[0], mesa(inputs(2, 70))[0], 1e-9)


def largest_inverse(config, steps):
    """The largest entry of R after ``steps`` equal tokens, in float32."""
    built = layer(config, dtype=torch.float32)
    x = inputs(1, 1, torch.float32).expand(-1, steps, -1)
    _, state = built(x, built.init_state(1, steps, x.device, x.dtype))
    return float(state["deviation"].detach().abs().max())


def test_recursive_least_squares_blows_up_with_a_forget_gate():
    """Where no key points R grows by 1 / gamma a token: it overflows, as `mesa` with the same gates does not."""
    forgetting = MesaRlsConfig(**SIZE, decay_gate=True, decay_bias=0.0)
    short, longer = (largest_inverse(forgetting, steps) for steps in (10, 30))
    assert longer > 100 * short
    assert not largest_inverse(forgetting, 400) < 1e30
    assert largest_inverse(MesaRlsConfig(**SIZE), 400) < 2
    mesa = layer(MesaConfig(**SIZE), dtype=torch.float32)
    assert mesa(inputs(1, 1, torch.float32).expand(-1, 400, -1))[0].isfinite().all()


# ---- diagnostics ----


def batch(steps=40):
    from data.dataset import Batch

    tokens = torch.randint(0, 11, (2, steps), generator=torch.Generator().manual_seed(0))
    fields = dict.fromkeys(Batch._fields) | {"inputs_BT": tokens, "targets_BT": tokens}
    return Batch(**fields)


def test_diagnostics_say_what_is_inside():
    model = language_model("mesa")
    with torch.no_grad():
        for block in model.backbone.layers:
            block.mixer.gate.weight.zero_()
            block.mixer.gate.bias.view(2, 2)[0] = torch.tensor([0.0, 5.0])  # gamma 0.5 and 0.9933
            block.mixer.gate.bias.view(2, 2)[1] = -50.0  # beta 0: no correction of gamma, nothing is stored
    rows = diagnose(model, batch())
    assert rows["diagnostics/half_life/layer0/head0"] == pytest.approx(1.0, rel=1e-4)
    assert rows["diagnostics/half_life/layer1/head1"] == pytest.approx(
        -0.6931472 / float(F.logsigmoid(torch.tensor(5.0))), rel=1e-3
    )
    assert rows["diagnostics/state_norm/layer0/head0"] < 1e-10
    names = {key.split("/")[1] for key in rows}
    assert names == {
        "half_life",
        "state_norm",
        "effective_rank",
        "cg_steps",
        *(f"cg_steps_quarter{i}" for i in range(1, 5)),
    }
    assert all(block.mixer.observed is None for block in model.backbone.layers)


def test_diagnostics_rank_and_steps():
    model = language_model("mesa")
    rows = diagnose(model, batch())
    for h in range(2):
        assert 1 <= rows[f"diagnostics/effective_rank/layer0/head{h}"] <= 8
        assert 1 <= rows[f"diagnostics/cg_steps/layer0/head{h}"] <= 30
    one = batch(1)
    assert diagnose(model, one)["diagnostics/effective_rank/layer0/head0"] == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("name, expected", [("transformer", set()), ("linear", {"state_norm", "effective_rank"})])
def test_diagnostics_of_mixers_without_gates(name, expected):
    model = language_model(name)
    before = dataclasses.asdict(model.config)
    assert {key.split("/")[1] for key in diagnose(model, batch())} == expected
    assert dataclasses.asdict(model.config) == before and model.training
