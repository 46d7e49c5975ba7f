"""No kernel runs unseen: a wrong one stops a strict run with figures, and a fallback run goes on without it.

The device is the CPU and the kernels are made up here; what a library's kernels compute is `test_fla_interpreter.py`.
"""

import dataclasses
import importlib.util
import inspect
import sys
import types

import pytest
import torch

from mixers import kernels
from mixers.kernels import Kernel, chosen, recording, use
from mixers.kernels.preflight import KernelRefused, case_of, draw, preflight, tolerance
from mixers.ops import attention as attention_forms
from mixers.ops import delta, linear, mesa, ssd
from models.lm import LanguageModel
from runs.kernel_choice import choose_kernels
from runs.validate import ConfigError
from tests.contract import cases

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_kernels_afterwards():
    yield
    use({})


@pytest.fixture
def library(monkeypatch):
    """A function that makes a library of one function, and the kernel table that names it."""

    def make(op, function):
        module = types.ModuleType("made_up_kernels")
        setattr(module, op, function)
        monkeypatch.setitem(sys.modules, "made_up_kernels", module)
        return {op: Kernel("made_up_kernels", "made-up", ("torch",))}

    return make


def calls_of(form, batch=1, steps=20, **arguments):
    """What recording one call notes. K = 8 and V = 6 are the widths."""
    with recording() as calls:
        chosen(form, torch.zeros(1))(**arguments)
    return calls


def delta_calls(documents=False):
    def x(*shape):
        return torch.rand(1, 20, 3, *shape)

    segments = torch.zeros(1, 20, dtype=torch.int64) if documents else None
    return calls_of(
        delta.chunk_delta_rule, q=x(8), k=x(8), v=x(6), beta=x(), g=-x(), scale=0.3, chunk_size=16, segment_ids=segments
    )


def right(*args, **options):
    """The same mathematics by other code."""
    options.pop("chunk_size")
    return delta.recurrent_delta_rule(*args, **options)


def wrong_forward(q, *args, **options):
    return right(1.01 * q, *args, **options)


class _WrongBelow(torch.autograd.Function):
    """Loses gradients that are small, as a guard of fixed size in a backward pass does."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx):
        return torch.where(dx.abs() < 1e-4, 0.0, dx)


def wrong_small_gradients(q, *args, **options):
    o, state = right(q, *args, **options)
    return _WrongBelow.apply(o), state


def check(table, mode="strict", calls=None):
    return preflight(calls or delta_calls(), mode, CPU, autocast=None, kernels=table)


@pytest.mark.parametrize("documents", [False, True])
def test_right_kernel_passes_and_runs(library, documents):
    report = check(library("chunk_delta_rule", right), calls=delta_calls(documents))
    (entry,) = report["ops"].values()
    assert entry["used"] and set(report["versions"]) == {"torch"}
    (case,) = entry["checks"]
    assert ("segment_ids" in case["case"]) == documents and "K=8, V=6, scale=0.3" in case["case"]
    assert {"o", "state", "dq", "dk", "dv", "dbeta", "dg", "dg at 1e-05"} <= set(case["errors"])
    assert max(case["errors"].values()) < 1e-4
    assert chosen(delta.chunk_delta_rule, torch.zeros(1)) is right
    assert chosen(linear.chunk_linear_attention, torch.zeros(1)) is linear.chunk_linear_attention


@pytest.mark.parametrize(
    ("function", "figures"),
    [(wrong_forward, r"o 0\.01 \(0\.0001\), dq 0\.01"), (wrong_small_gradients, r"dq at 1e-05 1 \(0\.0001\)")],
)
def test_wrong_kernel_stops_a_strict_run_with_figures(library, function, figures):
    with pytest.raises(
        KernelRefused, match=rf"chunk_delta_rule: .*made-up.* K=8.*{figures}.*trainer.kernels=torch"
    ) as stop:
        check(library("chunk_delta_rule", function))
    assert "\n" not in str(stop.value) and "trainer.kernels=fallback" in str(stop.value)
    assert chosen(delta.chunk_delta_rule, torch.zeros(1)) is delta.chunk_delta_rule


def test_fallback_warns_once_and_runs_the_torch_form(library, caplog):
    report = check(library("chunk_delta_rule", wrong_forward), "fallback")
    assert [r.levelname for r in caplog.records] == ["WARNING"] and "o 0.01 (0.0001)" in caplog.text
    entry = report["ops"]["chunk_delta_rule"]
    assert not entry["used"] and "disagrees" in entry["reason"] and entry["checks"][0]["errors"]["o"] == 0.01
    assert chosen(delta.chunk_delta_rule, torch.zeros(1)) is delta.chunk_delta_rule


def test_kernel_that_is_missing_or_fails_is_named():
    missing = {"chunk_delta_rule": Kernel("no_such_module", "made-up", (), install="pip install made-up")}
    with pytest.raises(KernelRefused, match="made-up cannot be imported .*no_such_module.*; pip install made-up"):
        check(missing)


@pytest.mark.skipif(importlib.util.find_spec("triton") is not None, reason="Triton is installed here")
def test_library_without_triton_is_a_missing_kernel():
    with pytest.raises(KernelRefused, match="flash-linear-attention cannot be imported.*triton"):
        check(kernels.KERNELS)


def test_kernel_that_raises_or_is_not_finite_is_refused(library):
    def raises(*args, **options):
        raise RuntimeError("out of\nshared memory")

    with pytest.raises(KernelRefused, match=r"fails with K=8, .*\(RuntimeError: out of shared memory\)"):
        check(library("chunk_delta_rule", raises))
    with pytest.raises(KernelRefused, match=r"o nan \(0\.0001\)"):
        check(library("chunk_delta_rule", lambda q, *a, **o: right(q * float("nan"), *a, **o)))


def test_one_bad_width_refuses_the_operation(library):
    def narrow(q, *args, **options):
        return right(q if q.shape[-1] <= 8 else 2 * q, *args, **options)

    x = torch.rand(1, 20, 3, 16)
    wide = calls_of(delta.chunk_delta_rule, q=x, k=x, v=x, beta=x[..., 0], chunk_size=16)
    table = library("chunk_delta_rule", narrow)
    assert check(table)["ops"]["chunk_delta_rule"]["used"]
    report = check(table, "fallback", [*delta_calls(), *wide])
    assert "K=16" in report["ops"]["chunk_delta_rule"]["reason"]
    assert chosen(delta.chunk_delta_rule, torch.zeros(1)) is delta.chunk_delta_rule


def test_bfloat16_is_compared_in_the_run_s_precision(library):
    calls = delta_calls()
    for name in "qkv":
        calls[0].arguments[name] = calls[0].arguments[name].bfloat16()
    report = preflight(calls, "strict", CPU, autocast=torch.bfloat16, kernels=library("chunk_delta_rule", right))
    (case,) = report["ops"]["chunk_delta_rule"]["checks"]
    assert 1e-4 < case["errors"]["o"] < tolerance("chunk_delta_rule", "o", torch.bfloat16)
    assert case["case"].endswith("bfloat16/float32")


def test_recording_notes_calls_and_runs_no_kernel():
    use({"chunk_delta_rule": None}, "cpu")
    calls = delta_calls()
    assert [c.torch_form for c in calls] == [delta.chunk_delta_rule] and calls[0].arguments["scale"] == 0.3
    assert chosen(delta.chunk_delta_rule, torch.zeros(1)) is None, "recording has ended"


def test_without_a_preflight_the_torch_forms_run():
    assert chosen(delta.chunk_delta_rule, torch.zeros(1)) is delta.chunk_delta_rule


@pytest.mark.parametrize("op", sorted(kernels.KERNELS))
def test_adapters_have_the_torch_form_s_signature(op):
    forms = {f.__name__: f for f in (linear.chunk_linear_attention, delta.chunk_delta_rule, mesa.chunk_mesa, ssd.ssd)}
    form = {**forms, "attention": attention_forms.attention}[op]
    kernel = kernels.KERNELS[op].load(op)  # needs no library
    names = [(p.name, p.kind, p.default) for p in inspect.signature(form).parameters.values()]
    assert [(p.name, p.kind, p.default) for p in inspect.signature(kernel).parameters.values()] == names


@pytest.mark.parametrize("name", cases.NAMES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_every_model_does_can_be_checked(name, precision, library):
    """Whatever a mixer calls that has a kernel: its case can be drawn, and the torch form passes as its own kernel."""
    config = cases.config(name)
    config.trainer.kernels, config.precision = "strict", precision
    model = cases.language_model(name)
    before = torch.random.get_rng_state()
    forms = {
        "attention": attention_forms,
        "ssd": ssd,
        "chunk_mesa": mesa,
        "chunk_delta_rule": delta,
        "chunk_linear_attention": linear,
    }
    own = {op: Kernel(module.__name__, "torch", ("torch",)) for op, module in forms.items()}
    try:
        report = choose_kernels(config, model, _Data(), device=CPU, kernels=own)
    finally:
        config.trainer.kernels, config.precision = "torch", "fp32"
    assert all(entry["used"] for entry in report["ops"].values())
    assert torch.equal(before, torch.random.get_rng_state()) and model.training


def test_evaluation_is_checked_too_where_it_solves_otherwise(library):
    config = cases.config("mesa")
    changed = dataclasses.replace(config, mixer=dataclasses.replace(config.mixer, eval_cg_steps=7))
    changed.trainer.kernels = "strict"
    model = LanguageModel(changed.model, changed.mixer, vocab_size=11)
    try:
        own = {"chunk_mesa": Kernel(mesa.__name__, "torch", ("torch",))}
        report = choose_kernels(changed, model, _Data(), device=CPU, kernels=own)
    finally:
        changed.trainer.kernels = "torch"
    said = [check["case"] for check in report["ops"]["chunk_mesa"]["checks"]]
    assert len(said) == 2 and "cg_steps=30" in said[0] and "cg_steps=7" in said[1]


class _Data:
    """As much of a data set as the choice reads."""

    def train_batch(self, step, rows):
        from data.dataset import Batch

        tokens = torch.arange(40)[None] % 11
        return Batch(tokens, tokens, torch.arange(40)[None] // 15, 40, None)


def test_strict_run_ends_with_a_config_error_and_a_torch_run_checks_nothing(library):
    config, model = cases.config("gated_deltanet"), cases.language_model("gated_deltanet")
    table = library("chunk_delta_rule", wrong_forward)
    assert choose_kernels(config, model, _Data(), device=CPU, kernels=table) == {"mode": "torch"}
    config.trainer.kernels = "strict"
    try:
        assert choose_kernels(config, model, _Data()) == {"mode": "torch"}, "on a CPU, torch forms always"
        with pytest.raises(ConfigError, match="chunk_delta_rule"):
            choose_kernels(config, model, _Data(), device=CPU, kernels=table)
    finally:
        config.trainer.kernels = "torch"


def test_a_window_is_shorter_than_the_sequence_that_checks_it():
    x = torch.rand(1, 20, 2, 8)
    (call,) = calls_of(attention_forms.attention, q=x, k=x, v=x, window=100)
    assert draw(case_of(call))["q"].shape == (2, 230, 2, 8)
