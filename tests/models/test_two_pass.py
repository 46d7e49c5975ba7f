"""Two passes in training, a recurrence in use: they are one network, and every choice of the config does what it says."""

import math

import pytest
import torch
import torch.nn.functional as F

from data.dataset import Batch
from mixers.base import Context
from models.drift import drift, long_sequences
from models.generation import generate
from models.lm import build_model
from models.memory_distance import distance
from models.two_pass import RECURRENT, TEACHER_FORCED, TwoPassModel, TwoPassState
from runs.validate import validate
from tests.contract.cases import ROOT, TINY, close

SMALL = ("mixer.window=5", "mixer.gate_init_std=0.5")
NANOCHAT = (
    "model.residual_scalars=true",
    "model.init=nanochat",
    "model.tied=false",
    "model.qk_norm=true",
    "model.norm=rms_plain",
)
VARIANTS = {
    "maglev": ["mixer=maglev"],
    "separate": ["mixer=maglev", "mixer.sharing=separate", "model.value_embeds=all"],
    "nanochat": ["mixer=maglev", *NANOCHAT, "model.value_embeds=alternate"],
    "shared scalars": ["mixer=maglev", *NANOCHAT, "mixer.sep_resid=false", "mixer.sep_x0=false"],
    "element gates": ["mixer=maglev", "mixer.gate_shape=element", "mixer.gates_for=separate_kv"],
    "scalar gates": ["mixer=maglev", "mixer.gate_shape=scalar", "mixer.rec_key_norm=full"],
    "keys only": ["mixer=maglev", "mixer.injection=[k]", "mixer.inject_layers=[1]"],
    "values only, layerwise": ["mixer=maglev", "mixer.injection=[v]", "mixer.rec_proj=layerwise"],
    "raw gates": ["mixer=maglev", "mixer.gate_input=raw"],
    "residual": ["mixer=maglev", "mixer.injection=[residual]", "mixer.gate_init_std=0"],
    "kv and residual": ["mixer=maglev", "mixer.injection=[k,v,residual]", "mixer.m0=learned"],
    "cross": ["mixer=maglev", "mixer.injection=[cross]"],
    "memory residual": ["mixer=maglev", "mixer.memory_residual=0.7"],
    "inner source": ["mixer=maglev", "mixer.sharing=separate", "mixer.source_layer=1"],
    "prefiller graded": ["mixer=maglev", "mixer.sharing=separate", "mixer.q_ce_weight=0.3"],
    "lrt": ["mixer=lrt"],
    "lrt, normed, full attention": ["mixer=lrt", "model.qk_norm=true", "mixer.p_pattern=SL", "mixer.subsets=3"],
    "lrt, paper": ["mixer=lrt", "mixer.source_layer=1", "mixer.injection=[k,v,residual]", "model.value_embeds=all"],
    "bptt": ["mixer=maglev", "mixer.training=bptt"],
}
TRAINED_TWICE = [name for name in VARIANTS if name != "bptt"]


def checked(*overrides, small=SMALL):
    from hydra import compose, initialize_config_dir

    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return validate(compose("config", overrides=[*TINY, *small, *overrides]))


def model_of(*overrides, dtype=torch.float64, vocabulary=11) -> TwoPassModel:
    model = build_model(checked(*overrides), vocabulary).to(dtype)
    assert isinstance(model, TwoPassModel)
    return model


def variant(name, dtype=torch.float64):
    model = model_of(*VARIANTS[name], dtype=dtype)
    with torch.no_grad():  # away from special values: zero projections, equal scalars
        generator = torch.Generator().manual_seed(5)
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator, dtype=dtype)
    return model.eval()


def tokens(batch=2, steps=23, seed=0):
    return torch.randint(0, 11, (batch, steps), generator=torch.Generator().manual_seed(seed))


def memories(batch=2, steps=23, seed=3, dtype=torch.float64):
    return torch.randn(batch, steps, 16, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def batch_of(x, y=None, segments=None, n=None):
    y = tokens(*x.shape, seed=1) if y is None else y
    return Batch(x, y, segments, n or int((y >= 0).sum()), None)


def decoded(model, x, before, segments=None):
    """Features of one parallel decoder pass that receives ``before``."""
    return model.decode(model.backbone.embedded(x), before, context=model.whole(x, segments)).features_BTD


# ---- one network in two forms ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", VARIANTS)
def test_parallel_pass_equals_steps_for_the_same_memories(name, dtype):
    model, x = variant(name, dtype), tokens()
    before = memories(dtype=dtype)
    whole, embedded = decoded(model, x, before), model.backbone.embedded(x)
    states, parts = model.init_state(2, 23).layers, []
    for t in range(23):
        context = Context(positions=torch.tensor([t]), tokens=x[:, t : t + 1])
        one = model.decode(embedded[:, t : t + 1], before[:, t : t + 1], states, context=context)
        states = one.states
        parts.append(one.features_BTD)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5}[dtype]
    close(torch.cat(parts, dim=1), whole, tolerance)


def plain_recurrence(model, x):
    """Eqs. 6 to 10 for one sequence and d_model = 16, two heads, spelled out with loops over time and heads."""
    config, mixer = model.config, model.mixer
    heads, width, window = mixer.n_heads, mixer.head_dim, mixer.window

    def rotated(vector, position):
        half = width // 2
        angles = [position * mixer.rope_base ** (-2 * j / width) for j in range(half)]
        out = vector.clone()
        for j, angle in enumerate(angles):
            out[j] = vector[j] * math.cos(angle) - vector[j + half] * math.sin(angle)
            out[j + half] = vector[j + half] * math.cos(angle) + vector[j] * math.sin(angle)
        return out

    def norm(vector, eps=1e-6):
        return vector / torch.sqrt((vector * vector).mean() + eps)

    memory, outputs = torch.zeros(16, dtype=torch.float64), []
    caches = [[[] for _ in range(heads)] for _ in model.backbone.layers]
    for t, token in enumerate(x.tolist()):
        stream = model.backbone.embed.weight[token] * 4.0
        key_all, value_all = model.projection.key.weight @ memory, model.projection.value.weight @ memory
        for layer, block in enumerate(model.backbone.layers):
            a = norm(stream, config.norm_eps) * block.mixer_norm.weight
            qkv = (block.mixer.qkv.weight @ a).view(3, heads, width)
            gates = 2 * torch.sigmoid(block.mixer.gate.weight @ a)
            mixed = []
            for h in range(heads):
                q, k, v = rotated(qkv[0, h], t), rotated(qkv[1, h], t), qkv[2, h]
                part = slice(h * width, (h + 1) * width)
                local, recurrent = gates[h], gates[heads + h]
                k = local * k + recurrent * rotated(norm(key_all[part]), t)
                v = local * v + recurrent * value_all[part]
                cache = caches[layer][h]
                cache.append((k, v))
                seen = cache[-window:]
                weights = torch.stack([q @ key / math.sqrt(width) for key, _ in seen]).softmax(0)
                mixed.append(sum(w * value for w, (_, value) in zip(weights, seen, strict=True)))
            stream = stream + block.mixer.out.weight @ torch.cat(mixed)
            b = norm(stream, config.norm_eps) * block.mlp_norm.weight
            up = block.mlp.up.weight @ b
            gate, value = up.chunk(2)
            stream = stream + block.mlp.down.weight @ (F.silu(gate) * value)
        memory = norm(stream, config.norm_eps)
        outputs.append(memory * model.backbone.final_norm.weight)
    return torch.stack(outputs)


def test_recurrence_is_that_of_the_paper():
    model, x = variant("maglev"), tokens(1, 17)
    with torch.no_grad():
        close(model.deployed_features(x)[0], plain_recurrence(model, x[0]), 1e-12)


@pytest.mark.parametrize("name", VARIANTS)
def test_generation_state_carries_the_recurrence(name):
    model, x = variant(name), tokens()
    with torch.no_grad():
        whole = model.logits(model.deployed_features(x))
        state, parts = model.init_state(2, 23), []
        for a, b in ((0, 9), (9, 20), (20, 21), (21, 23)):
            before = state.memory_BD.clone()
            logits, after = model.prefill(x[:, a:b], state)
            assert torch.equal(state.memory_BD, before)
            parts.append(logits)
            state = after
    close(torch.cat(parts, dim=1), whole, 1e-12)
    assert isinstance(state, TwoPassState) and state.length == 23


# ---- shift, causality, reach -----------------------------------------------------------------------------------------


def test_memory_is_shifted_by_exactly_one_and_starts_at_zero():
    model, x, m = variant("maglev"), tokens(), memories()
    assert torch.equal(model.shift(m)[:, 1:], m[:, :-1]) and (model.shift(m)[:, 0] == 0).all()
    changed = m.clone()
    changed[:, 9] += 1
    one, other = decoded(model, x, model.shift(m)), decoded(model, x, model.shift(changed))
    close(other[:, :10], one[:, :10], 1e-12)
    assert not torch.allclose(other[:, 10], one[:, 10]), "the next token must see it"


@pytest.mark.parametrize("name", VARIANTS)
def test_both_passes_are_causal(name):
    model, x = variant(name), tokens()
    changed = x.clone()
    changed[:, 12:] = (x[:, 12:] + 3) % 11
    if model.mixer.training == "two_pass":
        for one, other in zip(model.both_passes(x), model.both_passes(changed), strict=True):
            close(other.features_BTD[:, :12], one.features_BTD[:, :12], 1e-12)
            close(other.memory_BTD[:, :12], one.memory_BTD[:, :12], 1e-12)
            assert not torch.allclose(other.memory_BTD[:, 12], one.memory_BTD[:, 12])
    close(model.deployed_features(changed)[:, :12], model.deployed_features(x)[:, :12], 1e-12)


def test_prefiller_sees_the_whole_past_and_the_decoder_its_window_alone():
    """One layer, so that windows do not stack: slots t - W + 1 .. t hold memories t - W .. t - 1."""
    model = model_of("mixer=maglev", "model.n_layers=1", "mixer.q_pattern=L").eval()
    x, m, t, window = tokens(), memories(), 20, 5
    base = decoded(model, x, model.shift(m))

    def change_of_output(position):
        changed = m.clone()
        changed[:, position] += 1
        return float((decoded(model, x, model.shift(changed))[:, t] - base[:, t]).detach().abs().max())

    assert change_of_output(t - window - 1) == 0
    assert change_of_output(t - window) > 1e-6 and change_of_output(t - 1) > 1e-6
    early = x.clone()
    early[:, 0] = (x[:, 0] + 1) % 11
    assert torch.equal(decoded(model, early, model.shift(m))[:, t], base[:, t])
    passes = [model.prefill_memory(model.backbone.embedded(tokens), model.whole(tokens)) for tokens in (x, early)]
    of_x, of_early = (one.memory_BTD[:, t] for one in passes)
    assert not torch.allclose(of_x, of_early)


# ---- gates and initial values ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("gate_input", ["normed", "raw"])
def test_gates_read_the_layers_input_or_the_stream_before_its_norm(gate_input):
    model, x = model_of("mixer=maglev", f"mixer.gate_input={gate_input}").eval(), tokens()
    with torch.no_grad():
        for block in model.backbone.layers:
            block.mixer_norm.weight.mul_(3)
    block, streams = model.backbone.layers[1], []
    block.register_forward_pre_hook(lambda _block, arguments: streams.append(arguments[0]))
    block.mixer.observed = {}
    decoded(model, x, memories())
    read = streams[0] if gate_input == "raw" else block.mixer_norm(streams[0])
    gates = 2 * torch.sigmoid(read @ block.mixer.gate.weight.T)
    close(block.mixer.observed["gate_local"], gates[..., :2], 1e-12)
    close(block.mixer.observed["gate_memory"], gates[..., 2:], 1e-12)


@pytest.mark.parametrize("maps", ["shared", "layerwise"])
@pytest.mark.parametrize(
    ("start", "key", "value"), [("kv", True, True), ("zero_v", True, False), ("zero", False, False)]
)
def test_maps_from_the_memory_start_as_asked(maps, start, key, value):
    model = model_of("mixer=maglev", f"mixer.rec_proj={maps}", f"mixer.rec_init={start}")
    found = [model.projection] if maps == "shared" else [block.mixer.projection for block in model.backbone.layers]
    own = float(model.backbone.layers[0].mixer.qkv.weight.detach().std())
    for projection in found:
        for part, drawn in ((projection.key, key), (projection.value, value)):
            assert float(part.weight.detach().std()) == pytest.approx(own if drawn else 0.0, rel=0.2)


def test_memory_enters_the_stream_with_its_initial_weight():
    assert model_of("mixer=lrt", "mixer.injection=[k,v,residual]").memory_gain_L.tolist() == pytest.approx([0.1, 0.1])
    model = model_of(*VARIANTS["residual"], "mixer.residual_init=0.25")
    assert model.memory_gain_L.tolist() == [0.25, 0.25]
    x, m, inputs = tokens(), memories(), []
    model.backbone.layers[0].register_forward_pre_hook(lambda _block, arguments: inputs.append(arguments[0]))
    decoded(model, x, m)
    close(inputs[0], model.backbone.embedded(x) + 0.25 * m, 1e-12)


# ---- what it reduces to ----------------------------------------------------------------------------------------------


def test_neutral_gates_and_zero_memory_are_sliding_window_attention():
    maglev = model_of("mixer=maglev", "mixer.gate_init_std=0")
    swa = build_model(checked("mixer=swa", small=("mixer.window=5",)), 11).double()
    for key, value in swa.named_parameters():
        assert torch.equal(maglev.get_parameter(key), value), f"{key} starts from other numbers"
    x = tokens()
    assert torch.equal(decoded(maglev, x, torch.zeros(2, 23, 16, dtype=torch.float64)), swa.features(x))


def test_prefiller_is_interleaved_attention_without_gates():
    maglev = model_of("mixer=maglev")
    slsl = build_model(checked("mixer=slsl", "mixer.parts.S.window=5", small=()), 11).double()
    embedded = maglev.backbone.embedded(tokens())
    assert torch.equal(maglev.prefill_memory(embedded, maglev.whole(tokens())).features_BTD, slsl.features(tokens()))


def test_first_step_is_finite_where_output_projections_start_at_zero():
    """Both memories are then equal, and a bare root has no derivative there."""
    model = model_of("mixer=maglev", *NANOCHAT, dtype=torch.float32)
    loss, terms = model.loss(batch_of(tokens()))
    loss.backward()
    assert float(terms["distance"]) <= 1.1e-4  # the epsilon under the root
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


# ---- loss and gradients ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VARIANTS)
def test_every_parameter_gets_a_gradient(name):
    """Data parallelism waits for each of them."""
    model = variant(name).train()
    model.loss(batch_of(tokens()))[0].backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, key


def test_loss_is_cross_entropy_plus_the_unsquared_distance():
    model, x, y = variant("maglev"), tokens(), tokens(seed=1)
    y[0, :7] = -100
    first, second = model.both_passes(x)
    nats = -model.logits(second.features_BTD).log_softmax(-1).gather(-1, y.clamp(min=0)[..., None])[..., 0]
    apart = (second.memory_BTD - first.memory_BTD).square().sum(-1).sqrt() / math.sqrt(16)
    graded = y >= 0
    loss, terms = model.loss(batch_of(x, y))
    assert model.mixer.lam == 0.1
    torch.testing.assert_close(loss, (nats + 0.1 * apart)[graded].mean(), rtol=1e-6, atol=0)  # 1e-8 under the root
    torch.testing.assert_close(terms["cross_entropy"], nats[graded].mean())
    torch.testing.assert_close(terms["distance"], apart[graded].mean(), rtol=1e-6, atol=0)
    # The memory has unit size whatever the final norm's gain is, or training could shrink the distance for nothing.
    torch.testing.assert_close(
        second.memory_BTD.square().mean(-1), torch.ones(2, 23, dtype=torch.float64), rtol=1e-5, atol=0
    )


def test_memory_may_come_from_an_inner_layer_as_it_is():
    """LRT's source layer: the stream after that block, under no norm."""
    model, outputs = model_of("mixer=maglev", "mixer.source_layer=1", "mixer.lam=0").eval(), []
    model.backbone.layers[0].register_forward_hook(lambda _block, _inputs, output: outputs.append(output[0]))
    first, second = model.both_passes(tokens())
    assert torch.equal(first.memory_BTD, outputs[0]) and torch.equal(second.memory_BTD, outputs[1])


def test_parts_of_a_global_batch_add_up():
    model, x, y = variant("separate"), tokens(4), tokens(4, seed=1)
    y[0, :9] = -100
    n = int((y >= 0).sum())
    whole, terms = model.loss(batch_of(x, y, n=n))
    parts = [model.loss(batch_of(x[i : i + 1], y[i : i + 1], n=n)) for i in range(4)]
    torch.testing.assert_close(sum(loss for loss, _ in parts), whole)
    for key in terms:
        torch.testing.assert_close(sum(t[key] for _, t in parts), terms[key])


def test_gradient_reaches_the_prefiller_through_the_memory_alone():
    model = model_of("mixer=maglev", "mixer.sharing=separate", "mixer.lam=0")
    model.loss(batch_of(tokens()))[0].backward()
    assert all(p.grad.abs().sum() > 0 for p in model.prefiller.parameters())
    assert "prefiller_cross_entropy" not in model.loss(batch_of(tokens()))[1]


@pytest.mark.parametrize(("detach", "stays"), [("target", "prefiller"), ("decoder", "decoder")])
def test_detached_side_is_not_moved_by_the_distance(detach, stays):
    gradients = []
    for strength in (0.0, 1.0):
        held = [f"mixer.detach={detach}"] if strength else []
        model = model_of("mixer=maglev", "mixer.sharing=separate", f"mixer.lam={strength}", *held)
        if stays == "prefiller":
            named = dict(model.prefiller.named_parameters())
            with torch.no_grad():  # without this path the prefiller still hears of the distance through the memory
                model.projection.key.weight.zero_(), model.projection.value.weight.zero_()
        else:
            named = dict(model.backbone.named_parameters())
            named = {key: p for key, p in named.items() if "blocks.1.mlp" in key}  # the last to write the memory
        model.loss(batch_of(tokens()))[0].backward()
        gradients.append({key: p.grad for key, p in named.items()})
    for key in gradients[0]:
        torch.testing.assert_close(gradients[0][key], gradients[1][key], msg=key)


@pytest.mark.parametrize("form", ["rms", "mse", "cosine", "huber"])
def test_distances(form):
    a, b = memories(), memories(seed=4)
    wanted = {
        "rms": ((a - b) ** 2).mean(-1).sqrt(),
        "mse": ((a - b) ** 2).mean(-1),
        "cosine": 1 - (a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1)),
        "huber": torch.where((a - b).abs() < 1, 0.5 * (a - b) ** 2, (a - b).abs() - 0.5).mean(-1),
    }[form]
    torch.testing.assert_close(distance(a, b, form, 0.0), wanted)
    loss, terms = model_of("mixer=maglev", f"mixer.consistency={form}").loss(batch_of(tokens()))
    assert loss.isfinite() and ("consistency" in terms) == (form != "rms")


# ---- LRT ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "extra", [[], ["mixer.p_pattern=SL"], ["mixer.source_layer=1", "mixer.injection=[k,v,residual]"]]
)
def test_as_many_subsets_as_tokens_are_the_recurrence(extra):
    """Each position is then refined on refined memories, keys and values alone."""
    model = model_of("mixer=lrt", "mixer.subsets=23", *extra).eval()
    first, second = model.both_passes(tokens())
    close(second.features_BTD, model.deployed_features(tokens()), 1e-12)
    assert not torch.allclose(first.features_BTD, second.features_BTD)


def test_two_subsets_are_two_passes_over_odd_and_even_positions():
    """The even ones read pass 1's memories, the odd ones the even ones' new memories; keys are the newest there are."""
    model = model_of("mixer=lrt", "model.n_layers=1").eval()  # one layer: its keys depend on tokens and memories alone
    x, steps = tokens(), 23
    first, second = model.both_passes(x)
    zero = torch.zeros_like(first.memory_BTD)
    even = torch.arange(steps) % 2 == 0
    # Pass 1 is the decoder with a memory of zero; the keys of positions not refined yet are still those.
    close(
        first.memory_BTD,
        model.decode(model.backbone.embedded(x), zero, context=Context(torch.arange(steps))).memory_BTD,
        1e-12,
    )
    received = torch.where(even[:, None], model.shift(first.memory_BTD), zero)
    at_even = model.decode(model.backbone.embedded(x), received, context=Context(torch.arange(steps)))
    close(second.memory_BTD[:, even], at_even.memory_BTD[:, even], 1e-12)
    refined = torch.where(even[:, None], at_even.memory_BTD, first.memory_BTD)
    received = torch.where(even[:, None], received, model.shift(refined))
    at_odd = model.decode(model.backbone.embedded(x), received, context=Context(torch.arange(steps)))
    close(second.features_BTD[:, ~even], at_odd.features_BTD[:, ~even], 1e-12)


def test_lrt_loss_is_the_mean_over_all_its_passes():
    model, x, y = model_of("mixer=lrt", "mixer.subsets=2").eval(), tokens(steps=24), tokens(steps=24, seed=1)
    first, second = model.both_passes(x)

    def mean_nats(features, rows):
        nats = -model.logits(features).log_softmax(-1).gather(-1, y[..., None])[..., 0]
        return nats[:, rows].mean()

    wanted = (
        mean_nats(first.features_BTD, slice(None))
        + mean_nats(second.features_BTD, slice(0, None, 2))
        + mean_nats(second.features_BTD, slice(1, None, 2))
    ) / 3
    torch.testing.assert_close(model.loss(batch_of(x, y))[0], wanted)


# ---- documents ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VARIANTS)
def test_packed_documents_equal_the_documents_apart(name):
    model, x = variant(name), tokens()
    segments = torch.zeros(2, 23, dtype=torch.int64)
    segments[0, 8:], segments[1, 8:], segments[1, 15:] = 1, 1, 2
    for form in (model.features, model.deployed_features):
        if model.mixer.subsets > 1 and form == model.features:
            continue  # which subset a position belongs to depends on where its document begins
        together = form(x, segments)
        close(together[0, :8], form(x[:1, :8])[0], 1e-10)
        close(together[0, 8:], form(x[:1, 8:])[0], 1e-10)
        close(together[1, 8:15], form(x[1:, 8:15])[0], 1e-10)
        close(together[1, 15:], form(x[1:, 15:])[0], 1e-10)
        assert not torch.allclose(form(x)[:, 8:], together[:, 8:]), "without segments, memory goes on"


def test_packed_documents_in_subsets():
    """An even border leaves each position in its subset."""
    model, x = model_of("mixer=lrt").eval(), tokens()
    segments = (torch.arange(23) >= 8).long().expand(2, -1)
    together = model.features(x, segments)
    close(together[:, :8], model.features(x[:, :8]), 1e-10)
    close(together[:, 8:], model.features(x[:, 8:]), 1e-10)


# ---- quality in both modes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VARIANTS)
def test_grades_in_both_modes(name, monkeypatch):
    monkeypatch.setattr("models.two_pass.BLOCK", 5)
    model, x, y = variant(name), tokens(), tokens(seed=1)
    y[0, :7] = -100
    with torch.no_grad():
        forms = {RECURRENT: model.deployed_features(x), TEACHER_FORCED: model.features(x)}
        for mode in model.modes:
            logits = model.logits(forms[mode])
            graded = model.grade(batch_of(x, y), mode)
            wanted = F.cross_entropy(logits.transpose(1, 2), y, ignore_index=-100, reduction="none")
            torch.testing.assert_close(graded.nats_BT, wanted)
            assert torch.equal(graded.correct_BT, logits.argmax(-1) == y)
        assert torch.equal(model.grade(batch_of(x, y)).nats_BT, model.grade(batch_of(x, y), RECURRENT).nats_BT)
    with pytest.raises(ValueError, match="mode=parallel"):
        model.grade(batch_of(x, y), "parallel")


@torch.no_grad()
def test_drift_compares_own_memories_with_the_prefillers():
    model, x = variant("maglev"), tokens(3, 20)
    found = drift(model, x)
    first, second = model.both_passes(x)
    own, memory = [], torch.zeros(3, 16, dtype=torch.float64)
    states = model.init_state(3, 20).layers
    for t in range(20):
        one = model.decode(
            model.backbone.embedded(x[:, t : t + 1]), memory[:, None], states, context=Context(torch.tensor([t]))
        )
        memory, states = one.memory_BTD[:, 0], one.states
        own.append(memory)
    apart = (torch.stack(own, 1) - first.memory_BTD).square().mean(-1).sqrt()
    teacher = (second.memory_BTD - first.memory_BTD).square().mean(-1).sqrt()
    assert found.edges == [0, 8, 16, 20]
    assert found.recurrent == pytest.approx([float(apart[:, a:b].mean()) for a, b in ((0, 8), (8, 16), (16, 20))])
    assert found.teacher_forced == pytest.approx(
        [float(teacher[:, a:b].mean()) for a, b in ((0, 8), (8, 16), (16, 20))]
    )
    assert found.named()["drift"].keys() == {"0-7", "8-15", "16-19"}


def test_long_sequences_are_windows_put_together():
    rows = torch.arange(40).view(4, 10)
    document = torch.zeros(4, 10, dtype=torch.int64)
    document[3, 5:] = -1
    batches = [Batch(rows[i : i + 2], rows, None, 1, document[i : i + 2]) for i in (0, 2)]
    tokens_BT, documents_BT = long_sequences(batches, 20, 4, bos_id=7)
    assert torch.equal(tokens_BT, torch.arange(20).view(1, 20)) and documents_BT is None
    assert long_sequences(batches, 40, 4, bos_id=7) == (None, None)
    apart = [batch._replace(segment_ids_BT=torch.zeros_like(batch.inputs_BT)) for batch in batches]
    assert torch.equal(long_sequences(apart, 20, 4, bos_id=7)[1], (torch.arange(20) >= 7).long().view(1, 20))


def test_drift_knows_where_documents_begin():
    model, x = variant("maglev"), tokens(2, 16)
    border = (torch.arange(16) >= 8).long().expand(2, -1)
    together = drift(model, x, border)
    apart = [drift(model, x[:, a:b]) for a, b in ((0, 8), (8, 16))]
    for name in ("recurrent", "teacher_forced"):
        assert getattr(together, name) == pytest.approx([getattr(part, name)[0] for part in apart])


@pytest.mark.parametrize("passes", [1, 3, 12])
def test_assisted_prefill_gives_a_state_that_goes_on(passes):
    """As many passes as tokens are exact; fewer only near, from the prefiller's memory."""
    exact = model_of("mixer=maglev").eval()
    assisted = model_of("mixer=maglev", "mixer.prefill=q_assisted", f"mixer.prefill_passes={passes}").eval()
    x = tokens(steps=12)
    with torch.no_grad():
        logits, state = assisted.prefill(x, assisted.init_state(2, 20))
        wanted, same = exact.prefill(x, exact.init_state(2, 20))
        if passes == 12:
            close(logits, wanted, 1e-12)
            close(state.memory_BD, same.memory_BD, 1e-12)
        else:
            assert not torch.allclose(logits, wanted)
        if passes == 1:
            close(logits, assisted.logits(assisted.features(x)), 1e-12)
        # From there on the recurrence is the same one.
        more, _ = exact.prefill(x[:, :3], TwoPassState(state.layers, 12, state.memory_BD))
        close(assisted.prefill(x[:, :3], state)[0], more, 1e-12)
    assert len(list(generate(assisted, x, 4))) == 4
