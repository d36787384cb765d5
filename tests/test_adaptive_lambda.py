"""The controller of λ: driven through everything that it knows without a model, then in a run."""

from __future__ import annotations

import json
import math

import pytest
from tiny_run import configure, metrics, run, tiny_run

from mortice.checkpoint import load_checkpoint
from mortice.errors import ConfigError
from mortice.launch import prepare
from mortice_plugins.controllers.adaptive_lambda import AdaptiveLambda

KEY = "loss.beta"


def drive(controller, chosen, rejected=-3.0):
    """λ after each validation whose chosen log-probabilities these are."""
    state, held, seen = {}, None, []
    for step, value in enumerate(chosen):
        overrides, state = controller(step, {"lw": value, "lr": rejected}, state)
        held = overrides.get(KEY, held)
        assert held == state["lambda"]
        json.dumps(state)
        seen.append(held)
    return seen, state


def test_ramp_displacement_back_off_recovery_and_ramp():
    """Best −2.0 at first; tolerance 0.02, so −2.03 is a fall, −2.015 is not yet back, −1.99 is a new best."""
    controller = AdaptiveLambda(start=0.1, ramp=2.0, highest=0.5, back_off=0.5)
    seen, state = drive(controller, [-2.0, -1.95, -1.9, -1.9, -1.93, -1.915, -1.905, -1.8])
    assert seen == pytest.approx([0.1, 0.2, 0.4, 0.5, 0.25, 0.25, 0.5, 0.5])
    assert state["best"] == -1.8
    assert not state["stopped"]


def test_falls_in_a_row_stop_it_for_good():
    controller = AdaptiveLambda(start=0.4, lowest=0.05, patience=3)
    seen, state = drive(controller, [-2.0, -2.05, -2.06, -2.07, -1.0, -1.0])
    assert seen == pytest.approx([0.4, 0.2, 0.1, 0.05, 0.05, 0.05])
    assert state["stopped"]


@pytest.mark.parametrize("value", [-2.3, math.nan])
def test_a_deep_fall_stops_it_at_once(value):
    seen, state = drive(AdaptiveLambda(start=0.4, lowest=0.05), [-2.0, value, -1.0])
    assert seen == pytest.approx([0.4, 0.05, 0.05])
    assert state["stopped"]


def test_a_wide_margin_is_enough():
    seen, _ = drive(AdaptiveLambda(start=0.1, enough=1.5), [-2.0, -1.9, -1.4])
    assert seen == pytest.approx([0.1, 0.15, 0.15])


def test_bounds():
    seen, _ = drive(AdaptiveLambda(start=0.1, highest=0.2, ramp=3.0), [-2.0, -1.9, -1.8])
    assert seen == pytest.approx([0.1, 0.2, 0.2])
    seen, _ = drive(AdaptiveLambda(start=0.1, lowest=0.08, back_off=0.1, patience=9), [-2.0, -2.05, -2.06])
    assert seen == pytest.approx([0.1, 0.08, 0.08])


@pytest.mark.parametrize(
    ("options", "message"),
    [({"start": 2.0}, "must lie between lowest 0.02 and highest 1.0"), ({"stop": 0.01}, "must be above tolerance")],
)
def test_options_that_contradict(options, message):
    with pytest.raises(ValueError, match=message):
        AdaptiveLambda(**options)


def test_a_loss_without_its_metrics_is_refused():
    with pytest.raises(ConfigError, match="goes by lr, which this loss's validation has not"):
        AdaptiveLambda()(0, {"lw": -1.0}, {})


# In a run

ADAPTIVE = 'loss.lambda_schedule="adaptive"'


def test_the_short_form_brings_the_controller(tmp_path):
    file = tiny_run(tmp_path)
    assert configure(file).controllers == []
    ((name, controller),) = configure(file, ADAPTIVE, "loss.beta=0.3").controllers
    assert (name, controller.start) == ("adaptive-lambda", 0.3)
    named = ('controller.name="adaptive-lambda"', "controller.start=0.2", "controller.ramp=3.0")
    ((_, controller),) = configure(file, ADAPTIVE, *named).controllers
    assert (controller.start, controller.ramp) == (0.2, 3.0)


def test_a_run_with_it_changes_the_loss_and_keeps_its_state(tmp_path):
    file = tiny_run(tmp_path)
    settings = ("train.steps=4", "train.validate_every=1", "train.save_every=2", "train.keep=0")
    static, adaptive = run(file, *settings), run(file, *settings, ADAPTIVE)
    lines = [json.loads(line) for line in (adaptive.path / "metrics.jsonl").read_text().splitlines()]
    steered = [line[f"adaptive-lambda/{KEY}"] for line in lines if f"adaptive-lambda/{KEY}" in line]
    assert steered[0] == configure(file).losses[0][1].beta
    assert len(set(steered)) > 1
    losses = [[line["loss"] for line in metrics(outcome)] for outcome in (static, adaptive)]
    assert losses[0][0] == losses[1][0]
    assert losses[0][2:] != losses[1][2:]
    state = load_checkpoint(adaptive.checkpoint).state["controllers"]["adaptive-lambda"]
    assert state["lambda"] == steered[-1]
    # what the state holds is all that goes on from it
    after, _ = AdaptiveLambda(start=0.7)(5, {"lw": state["best"], "lr": state["best"] - 1}, state)
    grown = {} if state["lambda"] == 1.0 or state["stopped"] else {KEY: min(1.0, 1.5 * state["lambda"])}
    assert after == pytest.approx(grown)


def test_in_a_sum_of_losses_it_steers_its_own(tmp_path):
    """Not the option of that name which the first loss has."""
    text = tiny_run(tmp_path).read_text()
    losses = '[[loss]]\nname = "dpo"\n\n[[loss]]\nname = "orpo"\nlambda_schedule = "adaptive"\nbeta = 0.2\n'
    file = tmp_path / "sum.toml"
    file.write_text(text.replace('[loss]\nname = "orpo"\n', losses))
    ((_, controller),) = configure(file).controllers
    assert (controller.start, controller.option) == (0.2, "loss.1.beta")
    changed = configure(file).with_overrides({controller.option: 0.7})
    assert [loss.beta for _, loss in changed.losses] == [0.1, 0.7]


def test_without_validation_it_is_refused_before_training(tmp_path):
    text = tiny_run(tmp_path).read_text()
    file = tmp_path / "blind.toml"
    file.write_text(text.replace('valid = "valid.jsonl"\n', ""))
    with pytest.raises(ConfigError, match="controller adaptive-lambda: controllers go by validation"):
        prepare(configure(file, ADAPTIVE))
