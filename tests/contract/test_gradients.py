"""The recurrent form passes a numerical gradient check; the form that trains has the same gradients."""

import pytest
import torch

from tests.contract.cases import NAMES, close, inputs, mixer, stepped

pytestmark = pytest.mark.parametrize("name", NAMES)


def test_recurrent_form_against_finite_differences(name):
    layer = mixer(name)
    names, values = zip(*layer.named_parameters(), strict=True)

    def run(x, *parameters):
        y, _ = torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (x,), tie_weights=False)
        return y

    def run_stepped(x, *parameters):
        state = layer.init_state(1, 4, torch.device("cpu"), torch.float64)
        outputs = []
        for t in range(4):
            y, state = torch.func.functional_call(
                layer, dict(zip(names, parameters, strict=True)), (x[:, t : t + 1], state)
            )
            outputs.append(y)
        return torch.cat(outputs, dim=1)

    arguments = (inputs(1, 4).requires_grad_(), *(v.detach().clone().requires_grad_() for v in values))
    assert torch.autograd.gradcheck(run_stepped, arguments, fast_mode=True, atol=1e-6)
    assert torch.autograd.gradcheck(run, arguments, fast_mode=True, atol=1e-6)


def test_gradients_of_all_forms_are_equal(name):
    layer, weights = mixer(name), inputs(2, 70, seed=5)
    parameters = list(layer.parameters())
    gradients = []
    for form in (lambda x: layer(x)[0], lambda x: stepped(layer, x)[0]):
        x = inputs(2, 70).requires_grad_()
        gradients.append(torch.autograd.grad((form(x) * weights).sum(), [x, *parameters]))
    for whole, steps in zip(*gradients, strict=True):
        close(whole, steps, 1e-9)


def test_every_parameter_gets_a_gradient(name):
    layer = mixer(name)
    layer(inputs(2, 70))[0].square().sum().backward()
    for parameter_name, parameter in layer.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, parameter_name
