"""Torch's own tests of recurrent layers, by name, and the tests here that ask the same with sweeps forced.

`auto` leaves the short sequences of torch's tests to torch's own layers, so that running them on timeloom's modules
shows little; the tests named here force a parallel solver, or make `auto` take sweeps. The names are those of torch's
test/test_nn.py; a case that has no counterpart says why.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

COVERED: dict[str, tuple[str, ...]] = {
    "test_rnn_args_check": (
        "test_modules_errors.py::test_bad_inputs",
        "test_modules_errors.py::test_bad_initial_states",
    ),
    "test_rnn_check_device": ("test_modules_errors.py::test_weights_on_another_device",),
    "test_rnn_initial_hidden_state": ("test_modules_parity.py::test_without_an_initial_state",),
    "test_projections_lstm_args_check": ("test_modules_errors.py::test_bad_constructors_say_what_torchs_say",),
    "test_projections_lstm_initial_hidden_state": ("test_modules_parity.py::test_results_and_gradients",),
    "test_projections_errors_on_gru_and_rnn": ("test_modules_in_place.py::test_a_projection_is_refused_as_torch_does",),
    "test_RNN_nonlinearity": ("test_modules_parity.py::test_results_and_gradients",),
    "test_RNN_nonlinearity_passed_as_arg": ("test_modules_parity.py::test_constructor",),
    "test_RNN_dropout": ("test_modules_parity.py::test_dropout_draws_the_same_numbers",),
    "test_RNN_change_dropout": ("test_modules_parity.py::test_dropout_of_everything",),
    "test_variable_sequence": (
        "test_modules_ragged.py::test_packed",
        "test_modules_ragged.py::test_packed_in_any_order",
    ),
    "test_rnn_weight_norm": ("test_modules_wrapped.py::test_weight_norm_by_hooks",),
    "test_cudnn_weight_tying": ("test_modules_wrapped.py::test_weights_shared_with_another_module",),
    "test_rnn_retain_variables": ("test_modules_autograd.py::test_backward_twice_with_a_retained_graph",),
    "test_LSTM_grad_and_gradgrad": ("test_modules_autograd.py::test_second_derivatives",),
    "test_GRU_grad_and_gradgrad": ("test_modules_autograd.py::test_second_derivatives",),
    "test_RNN_cpu_vs_cudnn_no_dropout": ("gpu/test_on_device.py::test_on_device",),
}
"""What of torch's is asked here too, and where."""
NOT_COVERED: dict[str, str] = {
    "test_LSTM_cell": "a single step is torch's cell, which timeloom has none of",
    "test_GRU_cell": "a single step is torch's cell, which timeloom has none of",
    "test_RNN_cell_no_broadcasting": "a single step is torch's cell, which timeloom has none of",
    "test_cudnn_weight_format": "how cuDNN lays weights out; sweeps read torch's parameters",
    "test_cudnn_rnn_dropout_states_device": "cuDNN's own dropout state; between our layers it is torch's dropout",
    "test_RNN_dropout_state": "cuDNN's own dropout state; between our layers it is torch's dropout",
    "test_RNN_input_size_zero": "an input without features is left to torch's layer, whatever the solver",
    "test_rnn_fused": "torch's fused cells on a GPU; held against float64 by tests/gpu instead",
}
HERE = Path(__file__).parent


@pytest.mark.parametrize("name", COVERED)
def test_what_is_named_exists(name: str) -> None:
    for place in COVERED[name]:
        file, _, test = place.partition("::")
        assert re.search(rf"def {test}\(", (HERE / file).read_text()), place


def test_nothing_is_on_both_lists() -> None:
    assert not set(COVERED) & set(NOT_COVERED)
