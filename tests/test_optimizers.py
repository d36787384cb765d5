"""Adam and AdamW against their formula, and against torch's."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mortice_plugins.optimizers.adam import Adam, AdamW

START = [[0.5, -1.0, 2.0], [0.0, 3.0, -0.25]]
GRADIENTS = [
    [[0.1, -0.2, 0.3], [1.0, -4.0, 0.01]],
    [[0.2, 0.2, -0.3], [0.5, 2.0, 0.01]],
    [[-0.1, 0.0, 0.3], [1.0, 0.0, 0.02]],
    [[0.4, -0.1, 0.1], [0.2, 1.0, -0.01]],
    [[0.1, -0.3, 0.2], [1.5, -2.0, 0.03]],
]


def steps(builder, gradients=GRADIENTS) -> np.ndarray:
    optimizer = builder.build()
    params = {"w": mx.array(START)}
    optimizer.init(params)
    for gradient in gradients:
        params = optimizer.apply_gradients({"w": mx.array(gradient)}, params)
    return np.array(params["w"])


def by_formula(lr, beta1, beta2, eps, decay, gradients=GRADIENTS) -> np.ndarray:
    """Algorithm 2 of arXiv:1711.05101, float64."""
    w = np.array(START)
    m, v = np.zeros_like(w), np.zeros_like(w)
    for t, gradient in enumerate(np.array(gradients), start=1):
        m = beta1 * m + (1 - beta1) * gradient
        v = beta2 * v + (1 - beta2) * gradient**2
        w = w - lr * decay * w - lr * (m / (1 - beta1**t)) / (np.sqrt(v / (1 - beta2**t)) + eps)
    return w


def test_five_steps_by_the_formula():
    adamw = AdamW(learning_rate=0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)
    np.testing.assert_allclose(steps(adamw), by_formula(0.01, 0.8, 0.95, 1e-6, 0.1), atol=1e-6)
    np.testing.assert_allclose(steps(Adam(learning_rate=0.01)), by_formula(0.01, 0.9, 0.999, 1e-8, 0.0), atol=1e-6)


@pytest.mark.parametrize("builder", [Adam, AdamW])
def test_the_first_update_is_the_learning_rate(builder):
    moved = np.abs(steps(builder(learning_rate=0.01), GRADIENTS[:1]) - START)
    np.testing.assert_allclose(moved, 0.01, rtol=1e-3)
    uncorrected = np.abs(steps(builder(learning_rate=0.01, bias_correction=False), GRADIENTS[:1]) - START)
    np.testing.assert_allclose(uncorrected, 0.01 * 0.1 / 0.001**0.5, rtol=1e-3)


@pytest.mark.parametrize(
    ("option", "value"),
    [("learning_rate", 0.0), ("betas", (0.9,)), ("betas", (0.9, 1.0)), ("eps", 0.0), ("weight_decay", -0.1)],
)
def test_options_out_of_range(option, value):
    with pytest.raises(ValueError, match=option):
        AdamW(**{option: value})


@pytest.mark.oracle
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_five_steps_as_torch(decay):
    torch = pytest.importorskip("torch")
    w = torch.tensor(START, requires_grad=True)
    theirs = torch.optim.AdamW([w], lr=0.01, betas=(0.9, 0.999), eps=1e-8, weight_decay=decay)
    for gradient in GRADIENTS:
        w.grad = torch.tensor(gradient)
        theirs.step()
    ours = steps(AdamW(learning_rate=0.01, weight_decay=decay))
    np.testing.assert_allclose(ours, w.detach().numpy(), atol=1e-6)
