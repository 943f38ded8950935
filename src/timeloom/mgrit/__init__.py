"""Multigrid reduction in time, one file for each box of the algorithm.

`grid` (how time is coarsened), `propagators` (the coarse steps Φ of every level), `relax` (F- and C-relaxation),
`restrict` (down and up between levels), `cycle` (V, F and the first guess), `recorded` (the coarse levels as CUDA
graphs), `driver` (the fine grid: sweeps, residual, stop, fall back), `diagnosis` (why it stalled), `monitor` (how wrong
an inexact gradient is).
"""
