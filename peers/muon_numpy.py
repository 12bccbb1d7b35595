"""Muon in NumPy: one weight, one step. Run, it prints the numbers that test ops_muon expects.

Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon) moves a matrix in the direction of its
momentum with all singular values set to about 1. The factor 0.2 sqrt(columns), of a matrix [inputs,
outputs], makes an update as large as AdamW's (0.2 sqrt(max(rows, columns)): Liu et al. 2025,
arXiv:2502.16982), and half as large for mlp.c_proj. It is 0.2 sqrt(channels) times Jordan's factor.
"""
import numpy as np


def orthogonalize(u):
    """Five steps map singular values of u / |u| from 0.002 to 1 into 0.65 to 1.25."""
    x = u / max(np.linalg.norm(u), np.finfo(u.dtype).tiny)
    if u.shape[0] > u.shape[1]:
        x = x.T
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if u.shape[0] > u.shape[1] else x


def step(weight, m, gradient, lr, beta, decay, matrices=1):
    """Updates weight and m in place. GPT-2's qkv weight [C,3C] is three matrices of C columns."""
    m[:] = beta * m + gradient
    u = gradient + beta * m
    o = np.hstack([orthogonalize(part) for part in np.hsplit(u, matrices)])
    scale = 0.2 * np.sqrt(u.shape[1] // matrices)
    weight -= lr * (scale * o + decay * weight)


def test_numbers(count, scale, seed):
    """Those of ops_random in tests/ops.h: a linear congruential generator's upper 12 bits."""
    out = np.empty(count)
    for i in range(count):
        seed = (seed * 1664525 + 1013904223) % 2**32
        out[i] = scale * ((seed >> 20) / 2048 - 1)
    return out, seed


if __name__ == "__main__":
    # begin in u, end, rows, columns, matrices; and ranges of u whose weights decay
    weights = [(0, 768, 16, 48, 3), (768, 1536, 16, 48, 3), (1536, 2176, 40, 16, 1),
               (2176, 2752, 24, 24, 1)]
    ranges = [(0, 504), (504, 768), (768, 1536), (1536, 2176), (2176, 2752)]
    gradients, seed = test_numbers(2752 + 48, 1.0, 1)  # 64 times these, and a loss scale of 64
    masters, _ = test_numbers(2752, 1.0, seed)
    g, w, m = np.empty(2752), np.empty(2752), np.zeros(2752)
    decay = np.empty(2752)
    for r, (begin, end) in enumerate(ranges):
        g[begin:end] = gradients[begin + 8 * (r + 1):end + 8 * (r + 1)]
        w[begin:end] = masters[2752 - end:2752 - begin]
        decay[begin:end] = 0.1 if r % 2 else 0
    for lr in (0.0025, 0.005):  # warm-up
        for begin, end, rows, columns, matrices in weights:
            views = [x[begin:end].reshape(rows, columns) for x in (w, m, g, decay)]
            step(*views[:3], lr, 0.95, views[3], matrices)
    print(", ".join(f"{x:.9f}" for x in w[::400]))
