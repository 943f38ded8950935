"""`parallelize` under subclasses of torch's layers: the solver goes below them, and nothing of theirs is lost."""

from __future__ import annotations

import copy
import pickle
import re
import warnings
from abc import ABC, abstractmethod
from typing import Any

import pytest
import torch
from module_zoo import B, D, H, T, assert_same, call, inputs, used_sweeps
from torch import Tensor, nn
from torch.nn.utils import parametrizations, rnn

import timeloom as tl
from timeloom.solvers import Shooting

pytestmark = pytest.mark.usefixtures("one_thread")
CHUNKS = Shooting(chunk=4)


class Remembering(nn.LSTM):
    """Another initialisation, as neural-amp-modeler's."""

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.bias_ih_l0.data[H : 2 * H] += 2.0


class Doubled(nn.GRU):
    """A forward of its own around torch's, and arguments of its own."""

    def __init__(self, size: int, factor: float = 2.0) -> None:
        super().__init__(size, H)
        self.factor = factor

    def forward(self, input: Any, hx: Any = None) -> Any:
        output, final = super().forward(input, hx)
        return self.factor * output, final


class Padded(ABC, nn.RNNBase):
    """An abstract base beside torch's class, as pytorch-forecasting's."""

    @abstractmethod
    def fresh(self) -> Tensor: ...

    def forward(self, x: Any, hx: Any = None, lengths: Any = None, enforce_sorted: bool = True) -> Any:
        if lengths is None:
            return super().forward(x, hx=hx)
        packed = rnn.pack_padded_sequence(x, lengths, enforce_sorted=enforce_sorted, batch_first=self.batch_first)
        output, hidden = super().forward(packed, hx=hx)
        return rnn.pad_packed_sequence(output, batch_first=self.batch_first)[0], hidden


class Forecaster(Padded, nn.LSTM):
    def fresh(self) -> Tensor:
        return torch.zeros(1, H)


class Relu(nn.RNN):
    """A subclass that knows torch's older way to say super, and a hook of its own."""

    def __init__(self) -> None:
        super(Relu, self).__init__(D, H, nonlinearity="relu")  # noqa: UP008

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super(Relu, self).forward(*args, **kwargs)  # noqa: UP008


def subclasses() -> dict[str, nn.RNNBase]:
    torch.manual_seed(0)
    made = {"init": Remembering(D, H), "forward": Doubled(D), "abstract": Forecaster(D, H), "old": Relu()}
    return {name: layer.double() for name, layer in made.items()}


each = pytest.mark.parametrize("name", subclasses())


@each
def test_there_and_back(name: str) -> None:
    layer = subclasses()[name]
    plain, log = type(layer), []
    layer.register_forward_hook(lambda *_: log.append("after"))
    x, held, text = inputs(layer), vars(layer).keys() | set(), repr(layer)
    expected, parameters = call(layer, x), dict(layer.named_parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tl.parallelize(layer, CHUNKS) is layer
    assert isinstance(layer, plain)
    assert isinstance(layer, tl.GRU | tl.LSTM | tl.RNN)
    assert repr(layer).startswith(text.rstrip(")"))
    assert list(layer.state_dict()) == list(parameters)
    assert_same(call(layer, x), expected)
    assert used_sweeps(layer)
    assert tl.sequentialize(layer) is layer
    assert type(layer) is plain
    assert vars(layer).keys() == held
    assert_same(call(layer, x), expected)
    assert all(value is parameters[key] for key, value in layer.named_parameters())
    assert len(log) == 3


@each
def test_copies(name: str) -> None:
    layer = tl.parallelize(subclasses()[name], CHUNKS)
    x = inputs(layer)
    expected = call(layer, x)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert type(twin) is type(layer)
        assert twin.solver == CHUNKS
        assert_same(call(twin, x), expected)
        assert used_sweeps(twin)
        assert_same(call(tl.sequentialize(twin), x), expected)
        assert "timeloom" not in pickle.dumps(twin).decode("latin1")


def test_one_class_for_all_modules_of_a_class() -> None:
    first, second, plain = Doubled(D), Doubled(D), Doubled(D)
    tl.parallelize(nn.ModuleList([first, second]))
    assert type(first) is type(second)
    assert type(plain) is Doubled
    assert type(Doubled(D)) is Doubled
    assert (type(first).__name__, type(first).__module__) == ("Doubled", __name__)


def test_its_own_arguments_and_packing_stay() -> None:
    layer = subclasses()["abstract"]
    x, lengths = torch.randn(T, 3, D, dtype=torch.float64), torch.tensor([T, T - 2, 1])
    expected = layer(x, lengths=lengths)
    tl.parallelize(layer, CHUNKS)
    torch.testing.assert_close(layer(x, lengths=lengths), expected)
    assert used_sweeps(layer)
    torch.testing.assert_close(layer.fresh(), torch.zeros(1, H))


def test_new_weights_by_the_subclass() -> None:
    layer = tl.parallelize(Remembering(D, H))
    with torch.no_grad():
        layer.bias_ih_l0.zero_()
    layer.reset_parameters()
    assert layer.bias_ih_l0[H : 2 * H].min() > 1


def test_a_parametrized_subclass() -> None:
    layer = parametrizations.weight_norm(subclasses()["forward"], "weight_hh_l0")
    x = inputs(layer)
    expected = call(layer, x)
    assert isinstance(tl.parallelize(layer, CHUNKS), Doubled)
    assert_same(call(layer, x), expected)
    assert used_sweeps(layer)
    with pytest.raises(RuntimeError, match="Serialization of parametrized modules"):  # torch's own word
        pickle.dumps(layer)
    assert not isinstance(tl.sequentialize(layer), tl.GRU)
    assert_same(call(layer, x), expected)


def test_a_subclass_of_a_swapped_class_can_still_be_written() -> None:
    tl.parallelize(Doubled(D))

    class Tripled(Doubled):
        def forward(self, input: Any, hx: Any = None) -> Any:
            output, final = super().forward(input, hx)
            return 1.5 * output, final

    layer = Tripled(D)
    x = torch.randn(T, B, D)
    expected = layer(x)[0]
    torch.testing.assert_close(tl.parallelize(layer, CHUNKS)(x)[0], expected)
    assert used_sweeps(layer)


class Replaced(nn.GRU):
    def forward(self, input: Tensor, hx: Any = None) -> Any:
        return nn.GRU.forward(self, input, hx)


class Checked(nn.GRU):
    def check_input(self, input: Tensor, batch_sizes: Any) -> None:
        raise NotImplementedError


class Named(nn.GRU):
    def _cell(self) -> None: ...


class Holding(nn.GRU):
    def __init__(self) -> None:
        super().__init__(D, H)
        self.reports = "mine"


class Other(nn.RNNBase):
    def __init__(self) -> None:
        super().__init__("GRU", D, H)


REFUSED = {
    "forward": (lambda: Replaced(D, H), r"the forward of Replaced does not call super\(\)\.forward"),
    "asked": (lambda: Checked(D, H), "it has a check_input of its own"),
    "method": (lambda: Named(D, H), "its _cell is a name that timeloom's layer has, too"),
    "attribute": (Holding, "its reports is a name that timeloom's layer has, too"),
    "other": (Other, r"it derives from none of nn\.GRU, nn\.LSTM and nn\.RNN"),
}


@pytest.mark.parametrize(("make", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_taken_is_named_with_the_reason(make: Any, reason: str) -> None:
    mixed = nn.ModuleDict({"own": make(), "plain": nn.GRU(D, H)})
    own = type(mixed["own"])
    with pytest.warns(UserWarning, match=rf"left 'own' \({own.__name__}\) alone: {reason}") as caught:
        tl.parallelize(mixed, CHUNKS)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert [type(layer) for layer in mixed.values()] == [own, tl.GRU]
    with pytest.warns(UserWarning, match=r"left 'the model'.*timeloom\.unroll"):
        tl.parallelize(make())


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.other = nn.GRUCell(D, H), nn.Linear(D, D)
        self.stack = nn.ModuleList([nn.LSTMCell(D, H)])

    def forward(self, xs: Tensor, h: Tensor) -> Tensor:
        for x in self.other(xs):
            h = self.cell(x, h)
        return h

    def again(self, xs: Tensor, h: Any) -> list[Any]:
        return [cell(xs[0], h) for cell in self.stack]

    def step(self, h: Tensor, x: Tensor) -> Tensor:
        return self.cell(x, h)


def test_a_loop_over_a_cell_is_found_and_the_way_out_works() -> None:
    model = nn.Sequential(Decoder(), Decoder())
    with pytest.warns(UserWarning, match=r"self\.(cell|stack)") as caught:
        tl.parallelize(model)
    first, second = sorted((str(warning.message) for warning in caught), key=lambda text: "stack" in text)
    assert "Decoder.forward" in first
    assert f"{__file__}:" in first
    assert "nn.GRUCell" in first
    assert "timeloom.unroll(self.step, h0, xs)" in first
    assert "Decoder.again" in second
    assert "return self.stack[…](x, state)" in second
    assert "timeloom.unroll(self.step, (h0, c0), xs)" in second
    xs, h0 = torch.randn(T, B, D), torch.zeros(B, H)
    decoder = model[0]
    states, _ = tl.unroll(decoder.step, h0, decoder.other(xs), solver=CHUNKS)  # what was advised
    torch.testing.assert_close(states[-1], decoder(xs, h0))


def test_a_step_without_a_loop_is_nobodys_business() -> None:
    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cells = nn.ModuleList(nn.GRUCell(D, H) for _ in range(2))
            self.gru = nn.GRU(D, H)

        def forward(self, x: Tensor, h: Tensor) -> Tensor:
            return self.cells[0](x, h)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tl.parallelize(Step())


class Counting(nn.GRUCell):
    pass


class While(Decoder):
    def forward(self, xs: Tensor, h: Tensor) -> Tensor:
        step = 0
        while step < len(xs):
            h = self.cell(xs[step], h)
            step += 1
        return h


class Own(Decoder):
    def __init__(self) -> None:
        super().__init__()
        self.cell = Counting(D, H)


class ByMethods(Decoder):
    def further(self, h: Tensor, x: Tensor) -> Tensor:
        return self.step(h, x)

    def forward(self, xs: Tensor, h: Tensor) -> Tensor:
        for x in xs:
            h = self.further(h, x)
        return h


class OneStep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(D, H)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        return self.cell(x, h)


class ByModules(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = OneStep()

    def forward(self, xs: Tensor, h: Tensor) -> Tensor:
        for x in xs:
            h = self.inner(x, h)
        return h


LOOPS = {
    "while": (While, r"While\.forward .*over self\.cell, an nn\.GRUCell"),
    "own cell": (Own, r"Decoder\.forward .*over self\.cell, an nn\.GRUCell"),
    "methods": (
        ByMethods,
        r"ByMethods\.forward .*over self\.further, which calls an nn\.GRUCell.*\(self\.body, h0",
    ),
    "modules": (ByModules, r"ByModules\.forward .*over self\.inner, which calls an nn\.GRUCell"),
}


@pytest.mark.parametrize(("make", "told"), LOOPS.values(), ids=LOOPS)
def test_other_loops_are_found(make: Any, told: str) -> None:
    with pytest.warns(UserWarning, match=r"cannot see into the loop") as caught:
        tl.parallelize(make())
    assert sum(bool(re.search(told, str(warning.message))) for warning in caught) == 1
    assert not any("nothing is changed" in str(warning.message) for warning in caught)
