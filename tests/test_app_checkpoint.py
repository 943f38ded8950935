"""What a checkpoint keeps of what `auto` has learned."""

from __future__ import annotations

import json

import pytest
import torch

import timeloom as tl
from timeloom.app.train.checkpoint import experience_of, restore_experience
from timeloom.auto.layer_experience import LayerExperience
from timeloom.nn.base import Recurrent


def held(layer: Recurrent) -> dict[int, LayerExperience]:
    return layer._experiences


@pytest.fixture
def layer() -> tl.GRU:
    """It has been called, and has learned of calls that begin at known states."""
    torch.manual_seed(0)
    layer = tl.GRU(2, 8)
    layer(torch.randn(600, 1, 2))[0].sum().backward()
    held(layer)[0].beginning(known=True).note_look(20, 1e-3)
    held(layer)[0].backward.search.note_too_short(40, 1e-3)
    assert held(layer)[0].warm not in (None, held(layer)[0].forward)
    return layer


def test_all_that_was_learned_is_restored(layer: tl.GRU) -> None:
    other = tl.GRU(2, 8)
    restore_experience(other, json.loads(json.dumps(experience_of(layer, held))), held)  # as a file holds it
    assert held(other) == held(layer)
    assert held(other)[0].backward.search.missed[0].steps == 40


def test_what_another_version_has_learned_is_taken_as_far_as_it_is_understood(layer: tl.GRU) -> None:
    kept, other = experience_of(layer, held), tl.GRU(2, 8)
    kept[""]["0"]["forward"]["of_another_version"] = 3
    kept[""]["0"]["forward"]["rounding"] = 0.0  # which was a number there
    restore_experience(other, kept, held)
    assert held(other) == held(layer)
