"""A parameter is a parameter, wherever it lies; tensors on the same elements are tied."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zipfx
from tests.helpers.laws import EXACT, error, merge, parameters, run, unharmed
from zipfx.model.memory import families, own_memory, partners


class Attention(nn.Module):
    """Three projections, a mixing layer, a norm and a head: spaces of heads, and inside them."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))
        self.i, self.o, self.n = nn.Linear(4, 8), nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.h = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.i(x))
        q, k, v = (f(y).unflatten(-1, (2, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = ((q @ k.transpose(-1, -2)).softmax(-1) @ v).transpose(1, 2).flatten(2)
        return self.h(self.n((y + self.o(mixed)).mean(1)))


def alone(model: Attention) -> None:
    """As it is."""


def flat(model: Attention) -> None:
    nn.utils.vector_to_parameters(
        nn.utils.parameters_to_vector(model.parameters()), model.parameters()
    )


def rows(model: Attention) -> None:
    """Slices of one loaded tensor."""
    packed = torch.cat([m.weight.detach() for m in (model.q, model.k, model.v)])
    for m, part in zip((model.q, model.k, model.v), packed.split(8)):
        m.weight = nn.Parameter(part)


def columns(model: Attention) -> None:
    """Slices that are not contiguous: their elements take turns."""
    packed = torch.cat([m.weight.detach() for m in (model.q, model.k, model.v)], 1)
    for m, part in zip((model.q, model.k, model.v), packed.split(8, 1)):
        m.weight = nn.Parameter(part)


def weight_and_bias(model: Attention) -> None:
    for m in (model.q, model.i, model.h):
        both = torch.cat([m.weight.detach().flatten(), m.bias.detach()])
        m.weight = nn.Parameter(both[: -len(m.bias)].view_as(m.weight))
        m.bias = nn.Parameter(both[-len(m.bias) :])


def buffers(model: Attention) -> None:
    both = torch.stack([model.n.running_mean, model.n.running_var])
    model.n.running_mean, model.n.running_var = both[0], both[1]


def one_with_a_hole(model: Attention) -> None:
    """A parameter that is a part of something which is none."""
    wide = torch.randn(8, 20, dtype=torch.float64)
    wide[:, 5:13] = model.o.weight.detach()
    model.o.weight = nn.Parameter(wide[:, 5:13])


LAYOUTS = [alone, flat, rows, columns, weight_and_bias, buffers, one_with_a_hole]


@torch.no_grad()
def attention(layout: Callable[[Attention], None], seed: int = 0) -> Attention:
    torch.manual_seed(seed)
    model = Attention().double().eval()
    for t in (*model.n.buffers(), *model.n.parameters()):
        if t.is_floating_point():
            t.copy_(torch.rand_like(t) + 0.5)
    layout(model)
    return model


@pytest.mark.sweep
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_layout_of_memory_makes_no_difference(layout: Callable[[Attention], None]) -> None:
    x = torch.randn(6, 5, 4).double()
    model = attention(layout)
    spaces, expected = zipfx.analyze(model, x), zipfx.analyze(attention(alone), x)
    assert str(spaces) == str(expected)
    twin = spaces.permuted(model, spaces.random_permutations(1))
    assert error(run(model, (x,)), run(twin, (x,))) < EXACT


@pytest.mark.sweep
@pytest.mark.parametrize("repair", ["none", "refit"])
@pytest.mark.parametrize("cut", [None, "o"])
@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_nor_does_it_in_a_merge(
    layout: Callable[[Attention], None], cut: str | None, repair: str
) -> None:
    """Also if the models do not have the same one."""
    data = [(torch.randn(6, 5, 4).double(),) for _ in range(5)]
    expected = run(
        merge([attention(alone), attention(alone, 1)], data, partial=cut, repair=repair), data[0]
    )
    for other in (layout, alone):
        models = [attention(layout), attention(other, 1)]
        merged = unharmed(models, lambda m=models: merge(m, data, partial=cut, repair=repair))
        assert isinstance(merged, nn.Module), merged
        assert error(expected, run(merged, data[0])) < 1e-9


# ------------------------------------------------------------------ ties
class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 8), nn.Linear(8, 6), nn.Linear(6, 8)
        self.h, self.w = nn.Linear(8, 3), nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.c(torch.relu(self.b(torch.relu(self.a(x))))))
        return self.h(F.linear(y, self.w))


def transposed(model: Tied) -> None:
    model.c.weight = nn.Parameter(model.b.weight.detach().t())


def same(model: Tied) -> None:
    model.h = nn.Linear(8, 6).double()
    model.h.weight = nn.Parameter(model.b.weight.detach())


def part_first(model: Tied) -> None:
    """The part comes before the whole."""
    packed = torch.randn(8, 8).double()
    model.b.weight, model.w = nn.Parameter(packed[1:7]), nn.Parameter(packed)


def part_last(model: Tied) -> None:
    packed = torch.randn(8, 8).double()
    model.a, model.b, model.h = nn.Linear(4, 8), nn.Linear(8, 6), nn.Linear(8, 3)
    model.double()
    model.w, model.h.weight = nn.Parameter(packed), nn.Parameter(packed[2:5])


def overlapping(model: Tied) -> None:
    packed = torch.randn(20, 8).double()
    model.w, model.b.weight = nn.Parameter(packed[:8]), nn.Parameter(packed[5:11])


TIES = [transposed, same, part_first, part_last, overlapping]


@pytest.mark.sweep
@pytest.mark.parametrize("tie", TIES)
@pytest.mark.parametrize("cut", [None, "a", "b", "c"])
def test_tensors_on_the_same_elements_move_together(
    tie: Callable[[Tied], None], cut: str | None
) -> None:
    torch.manual_seed(0)
    model = Tied().double().eval()
    tie(model)
    x = torch.randn(6, 4).double()
    spaces = zipfx.analyze(model, x, verify=False)
    twin = spaces.permuted(model, spaces.random_permutations(1))
    expected = run(model, (x,))
    assert error(expected, run(twin, (x,))) < EXACT
    named, moved = dict(model.named_parameters()), dict(twin.named_parameters())
    for family in partners(named):  # still the same elements, wherever they are now
        for one in family[1:]:
            kept = torch.isin(named[one], named[family[0]])
            assert torch.equal(torch.isin(moved[one], moved[family[0]]).sum(), kept.sum())
    data = [(torch.randn(20, 4).double(),) for _ in range(6)]
    for repair in ("none", "refit"):
        merged = merge([model, twin], data, partial=cut, matcher="permute", repair=repair)
        outputs = run(merged, (x,))
        for output in (outputs,) if cut is None else outputs:
            assert error(expected, output) < EXACT
    if cut is None:
        assert parameters(merged) == parameters(model)


def test_a_tie_is_kept_and_its_weights_are_not_refitted() -> None:
    torch.manual_seed(0)
    models = [Tied().double().eval() for _ in range(2)]
    for model in models:
        transposed(model)
    data = [(torch.randn(20, 4).double(),) for _ in range(6)]
    merged = merge(models, data, repair="refit")
    assert torch.equal(merged.c.weight, merged.b.weight.t())
    assert merged.c.weight.data_ptr() == merged.b.weight.data_ptr()
    names = [r.name for r in merged.meta["zipfx"].refits]
    assert names == ["a", "w", "h"]


def test_writing_to_shared_elements_is_refused() -> None:
    class Writes(Tied):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.b.weight.mul_(0.9)
            return super().forward(x)

    model = Writes().double()
    transposed(model)
    with pytest.raises(zipfx.ZipError, match=r"writes to 'b\.weight', which shares memory"):
        zipfx.analyze(model, torch.randn(6, 4).double())


# ------------------------------------------------------------------ the functions themselves
def test_neighbours_are_told_from_partners() -> None:
    flat = torch.arange(60.0)
    a, b, c = flat[:20].view(4, 5), flat[20:40].view(4, 5), flat[30:50]
    even, odd = flat[50:60:2], flat[51:60:2]
    found = [{id(t) for t in family} for family in families([a, b, c, even, odd, a.t()])]
    sets = ({id(b), id(c)}, {id(even)}, {id(odd)})
    assert all(s in found for s in sets)
    assert len(found) == 4


def test_own_memory_keeps_what_is_shared() -> None:
    flat = torch.arange(40.0)
    tensors = {"a": flat[:20].view(4, 5), "t": flat[:20].view(4, 5).t(), "b": flat[20:]}
    new = own_memory(tensors.values())
    twins = {name: new[id(t)] for name, t in tensors.items()}
    assert all(torch.equal(twins[name], t) for name, t in tensors.items())
    assert partners(twins) == [("a", "t")]
    twins["a"][1, 2] = -1
    assert twins["t"][2, 1] == -1
    assert flat[7] == 7


def test_a_complex_tensor_and_its_parts() -> None:
    z = torch.zeros(5, dtype=torch.complex64)
    real, imaginary = torch.view_as_real(z).unbind(-1)
    assert [len(f) for f in families([real, imaginary])] == [1, 1]
    assert [len(f) for f in families([z, real, imaginary])] == [3]
