"""Checks and times the CUDA sweeps: to be run on a GPU."""

import sys
import time

import torch

sys.path.insert(0, "src")
from timeloom.cells.gru import GRUCell
from timeloom.cells.lstm import LSTMCell
from timeloom.cells.rnn import RNNCell
from timeloom.kernels.cuda import sweeper as module
from timeloom.kernels.cuda.sweeper import CUDASweeper
from timeloom.kernels.reference import AdjointData, ReferenceSweeper
from timeloom.problem import Recurrence, cut, empty_states

dev = "cuda"


def cell_of(kind, n, dtype, scale=1.0, zb=0.0, seed=0):
    g = torch.Generator().manual_seed(seed)
    k = n**-0.5
    if kind == "gru":
        w = (torch.rand(3 * n, n, generator=g) * 2 - 1) * k * scale
        b = (torch.rand(n, generator=g) * 2 - 1) * k
        return GRUCell(w.to(dev, dtype), b.to(dev, dtype)), 3
    if kind == "lstm":
        return LSTMCell(((torch.rand(4 * n, n, generator=g) * 2 - 1) * k * scale).to(dev, dtype)), 4
    return RNNCell(((torch.rand(n, n, generator=g) * 2 - 1) * k * scale).to(dev, dtype), kind.split("_")[1]), 1


def check(kind, n, T, B, chunk, lead, lengths=None, resets=False, scale=1.0, gscale=1.0, h0=1.0):
    cell, gates = cell_of(kind, n, torch.float32, scale)
    cell64, _ = cell_of(kind, n, torch.float32, scale)
    cell64 = cell64.with_weights(tuple(w.double() for w in cell64.weights))
    g = torch.Generator().manual_seed(1)
    u = torch.randn(T, B, gates * n, generator=g).to(dev)
    S = cell.size
    init = (torch.randn(B, S, generator=g) * 0.5 * h0).to(dev)
    rs = (torch.rand(T, B, generator=g) < 0.05).to(dev) if resets else None
    ln = torch.tensor(lengths) if lengths else None
    p = Recurrence(cell, u, init, ln, rs)
    p64 = Recurrence(cell64, u.double(), init.double(), ln, rs)
    seg = cut(p, chunk)
    rows = len(seg)
    out = {}
    start = (torch.randn(rows, S, generator=g) * 0.3 * h0).to(dev)

    def run(P, kind_, dt):
        sw = kind_(P)
        st = [torch.full_like(s, float("nan")) for s in empty_states(T, P.initial, P.cell.parts)]
        for s, i in zip(st, P.initial.split(P.cell.parts, -1)):
            s[0] = i
        if lead:
            a = sw.forward_entering(seg, lead, st, True)
        else:
            a = (start.to(dt), *sw.forward(seg, start.to(dt), st, True))
        return a, st

    (fa, fs), (ra, rs_) = run(p, CUDASweeper, torch.float32), run(p64, ReferenceSweeper, torch.float64)
    nf, _ = run(p, ReferenceSweeper, torch.float32)

    def err(x, y):
        m = ~torch.isnan(y)
        bad = (torch.isnan(x) != torch.isnan(y)).any().item()
        return (
            float("inf")
            if bad
            else ((x.double() - y).abs()[m].max() / y.abs()[m].max().clamp(min=1e-300)).item()
            if m.any()
            else 0.0
        )

    out["f"] = [err(x, y) for x, y in zip(fa, ra)]
    out["f32"] = [err(x, y) for x, y in zip(nf, ra)]
    out["states"] = max(err(x, y) for x, y in zip(fs, rs_))
    one = cut(p64, T)
    exact = empty_states(T, p64.initial, p64.cell.parts, zeroed=True)
    ReferenceSweeper(p64).forward(one, p64.initial, exact)
    st64 = [torch.nan_to_num(s) for s in exact]
    st = [s.float() for s in st64]
    st64 = [s.double() for s in st]
    segb = cut(p, chunk, backwards=True)
    inc = (torch.randn(T, B, n, generator=g) * gscale).to(dev)
    fin = (torch.randn(B, S, generator=g) * gscale).to(dev)
    end = (torch.randn(rows, S, generator=g) * gscale).to(dev)

    def back(P, kind_, dt, states):
        sw = kind_(P)
        gg = torch.full((T, B, cell.gate_width), float("nan"), device=dev, dtype=dt)
        rg = torch.full((rows, S), float("nan"), device=dev, dtype=dt) if resets else None
        d = AdjointData(states, inc.to(dt), gg, rg)
        if lead:
            a = sw.adjoint_entering(segb, lead, fin.to(dt), d, True)
        else:
            a = (end.to(dt), *sw.adjoint(segb, end.to(dt), d, True))
        return (*a, gg) + ((rg,) if resets else ())

    b, r, q = (
        back(p, CUDASweeper, torch.float32, st),
        back(p64, ReferenceSweeper, torch.float64, st64),
        back(p, ReferenceSweeper, torch.float32, st),
    )
    out["b"] = [err(x, y) for x, y in zip(b, r)]
    out["b32"] = [err(x, y) for x, y in zip(q, r)]
    bad = max(out["f"] + [out["states"]]) > 5 * max(out["f32"]) + 1e-6 or max(out["b"]) > 5 * max(out["b32"]) + 1e-6
    fmt = lambda v: " ".join(f"{x:.0e}" for x in v)
    print(
        ("BAD " if bad else "ok  ")
        + f"{kind} n={n} T={T} B={B} chunk={chunk} lead={lead} len={lengths is not None} resets={resets} x{scale} g{gscale} h{h0}: fwd {fmt(out['f'])} states {out['states']:.0e} (f32 {fmt(out['f32'])}) bwd {fmt(out['b'])} (f32 {fmt(out['b32'])})",
        flush=True,
    )
    return bad


def bench(fn, k=5):
    for _ in range(2):
        fn()
    torch.cuda.synchronize()
    v = []
    for _ in range(k):
        a, b = torch.cuda.Event(True), torch.cuda.Event(True)
        a.record()
        fn()
        b.record()
        torch.cuda.synchronize()
        v.append(a.elapsed_time(b))
    return sorted(v)[len(v) // 2]


def speed(kind, n, B, T=16384):
    net = {"gru": torch.nn.GRU, "lstm": torch.nn.LSTM}.get(kind, torch.nn.RNN)(n, n).to(dev)
    x = torch.randn(T, B, n, device=dev, requires_grad=True)
    with torch.no_grad():
        cf = bench(lambda: net(x), 3)
    y, _ = net(x)
    g = torch.randn_like(y)

    def step():
        y, _ = net(x)
        torch.autograd.grad(y, [x, *net.parameters()], g)

    cb = bench(step, 3)
    cell, gates = cell_of(kind, n, torch.float32)
    u = torch.randn(T, B, gates * n, device=dev)
    init = torch.zeros(B, cell.size, device=dev)
    p = Recurrence(cell, u, init)
    out = f"{kind} n={n} B={B}: cuDNN fwd {cf:.2f} both {cb:.2f} ms;"
    for C, single in ((1, True), (1, False), (64, True), (64, False), (512, True), (512, False)):
        module.SINGLE = 10**9 if single else 0
        seg, segb = cut(p, -(-T // C)), cut(p, -(-T // C), backwards=True)
        rows = len(seg)
        saved = CUDASweeper.room_for_saved(p)
        st = empty_states(T, init, cell.parts)
        sw = CUDASweeper(p, saved)
        start = torch.zeros(rows, cell.size, device=dev)
        f0 = (
            bench(lambda: sw._forward(seg, start, st, False, 0))
            if saved is None
            else bench(lambda: CUDASweeper(p)._forward(seg, start, st, False, 0))
        )
        f = bench(lambda: sw._forward(seg, start, st, False, 0))
        gg = torch.empty(T, B, cell.gate_width, device=dev)
        d = AdjointData(st, g, gg)
        b = bench(lambda: sw._adjoint(segb, start, d, False, 0, None))
        out += f"\n    C={C} {'single' if single else 'tile'}: fwd {f0:.3f} saving {f:.3f} adj {b:.3f} ({f / (T / C) * 1e3:.3f}+{b / (T / C) * 1e3:.3f} us/step);"
    print(out, flush=True)


if __name__ == "__main__":
    t0 = time.time()
    bad = 0
    for single in (True, False):
        module.SINGLE = 10**9 if single else 0
        print("single" if single else "tile")
        for kind in ("gru", "lstm", "rnn_tanh", "rnn_relu"):
            for n in (64, 16, 32, 1, 3, 33, 48) if kind == "lstm" else (64, 16, 32, 1, 3, 33, 48, 65, 100, 128):
                bad += check(kind, n, 37, 3, 8, 0)
                bad += check(kind, n, 37, 3, 8, 5)
            bad += check(kind, 32, 1, 1, 1, 0)
            bad += check(kind, 33, 50, 5, 9, 4, [50, 3, 0, 17, 41])
            bad += check(kind, 32, 50, 5, 9, 4, [50, 3, 0, 17, 41], True)
            bad += check(kind, 17, 50, 5, 9, 0, None, True)
            bad += check(kind, 64, 300, 2, 300, 0, scale=2.0)
            bad += check(kind, 64, 40, 2, 8, 3, gscale=1e-12)
            bad += check(kind, 64, 40, 2, 8, 3, gscale=1e12, scale=4.0)
            bad += check(kind, 64, 40, 2, 8, 3, h0=1e6)
    print("bad:", bad, f"{time.time() - t0:.0f} s")
    for kind in ("gru", "lstm"):
        for n in (32, 64, 128) if kind == "gru" else (32, 64):
            for B in (1, 16):
                speed(kind, n, B)
    speed("rnn_tanh", 64, 1)
    print(f"{time.time() - t0:.0f} s")
