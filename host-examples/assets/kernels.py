"""GPU kernels for training, in Triton: per-frame GroupNorm with SiLU, and convolutions with few channels.

The libraries' own are slow here: what autograd keeps for a norm is most of the memory traffic of a step, and no
library convolution is made for 16 channels. `train.py` checks and times each of these against PyTorch's and uses
only what is right and quicker. Layout everywhere: [B, T, H, W, C], contiguous.
"""
import torch
import triton
import triton.language as tl

EPS = 1e-6
at_least_16 = lambda n: max(16, triton.next_power_of_2(n))


# ---------------------------------------------------------------------------------------------------------- norm

@triton.jit
def sums_kernel(x, dy, scale, shift, out, pixels, C: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr,
                BACK: tl.constexpr, SILU: tl.constexpr):
    """Sums over a part of a frame, per channel: of x and x^2; on the way back of g and g x, g the gradient before SiLU."""
    frame, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    c = tl.arange(0, BC)
    ok = c < C
    first, second = tl.zeros((BP, BC), tl.float32), tl.zeros((BP, BC), tl.float32)
    if BACK:
        a = tl.load(scale + frame * C + c, mask=ok, other=0.0)[None, :]
        b = tl.load(shift + frame * C + c, mask=ok, other=0.0)[None, :]
    for p0 in range(part * BP, pixels, parts * BP):
        p = p0 + tl.arange(0, BP)
        m = (p < pixels)[:, None] & ok[None, :]
        at = (frame * pixels + p)[:, None] * C + c[None, :]
        v = tl.load(x + at, mask=m, other=0.0).to(tl.float32)
        if BACK:
            g = tl.load(dy + at, mask=m, other=0.0).to(tl.float32)
            if SILU:
                u = v * a + b
                s = 1 / (1 + tl.exp(-u))
                g = g * s * (1 + u * (1 - s))
            first += g
            second += g * v
        else:
            first += v
            second += v * v
    to = out + (frame * parts + part) * 2 * C + c
    tl.store(to, tl.sum(first, 0), mask=ok)
    tl.store(to + C, tl.sum(second, 0), mask=ok)


@triton.jit
def apply_kernel(x, dy, scale, shift, k0, k1, y, pixels, C: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr,
                 BACK: tl.constexpr, SILU: tl.constexpr):
    """y = silu(x scale + shift); on the way back g scale + x k1 + k0."""
    frame = tl.program_id(0)
    c, p = tl.arange(0, BC), tl.program_id(1) * BP + tl.arange(0, BP)
    ok = c < C
    m = (p < pixels)[:, None] & ok[None, :]
    at = (frame * pixels + p)[:, None] * C + c[None, :]
    v = tl.load(x + at, mask=m, other=0.0).to(tl.float32)
    a = tl.load(scale + frame * C + c, mask=ok, other=0.0)[None, :]
    b = tl.load(shift + frame * C + c, mask=ok, other=0.0)[None, :]
    u = v * a + b
    s = 1 / (1 + tl.exp(-u))
    if BACK:
        g = tl.load(dy + at, mask=m, other=0.0).to(tl.float32)
        if SILU: g = g * s * (1 + u * (1 - s))
        d0 = tl.load(k0 + frame * C + c, mask=ok, other=0.0)[None, :]
        d1 = tl.load(k1 + frame * C + c, mask=ok, other=0.0)[None, :]
        r = g * a + v * d1 + d0
    else:
        r = u * s if SILU else u
    tl.store(y + at, r.to(y.dtype.element_ty), mask=m)


def sums(x, dy, scale, shift, silu):
    n, pixels, c = x.shape
    bc = at_least_16(c)
    bp = 2048 // bc
    parts = max(1, min(triton.cdiv(pixels, 4 * bp), triton.cdiv(2048, n)))
    out = torch.empty(n, parts, 2, c, device=x.device)
    sums_kernel[n, parts](x, dy, scale, shift, out, pixels, c, bc, bp, dy is not x, silu, num_warps=4)
    return out.sum(1).unbind(1)


def apply(x, dy, scale, shift, k0, k1, silu):
    n, pixels, c = x.shape
    bc, y = at_least_16(c), torch.empty_like(x)
    bp = 4096 // bc
    apply_kernel[n, triton.cdiv(pixels, bp)](x, dy, scale, shift, k0, k1, y, pixels, c, bc, bp, dy is not x, silu, num_warps=4)
    return y


class FrameNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gamma, beta, groups, silu):
        shape, x = x.shape, x.contiguous().flatten(0, 1).flatten(1, 2)
        n, pixels, c = x.shape
        pool = lambda v: (v.view(n, groups, -1).sum(2, keepdim=True) / (pixels * c // groups)).expand(n, groups, c // groups).reshape(n, c)
        s, q = (pool(v) for v in sums(x, x, x, x, silu))
        rstd = torch.rsqrt((q - s * s).clamp(min=0) + EPS)
        scale = gamma * rstd
        shift = torch.addcmul(beta, s, scale, value=-1)
        ctx.save_for_backward(x, gamma, s, rstd, scale, shift)
        ctx.how = shape, silu, pool
        return apply(x, x, scale, shift, scale, scale, silu).view(shape)

    @staticmethod
    def backward(ctx, dy):
        x, gamma, mean, rstd, scale, shift = ctx.saved_tensors
        shape, silu, pool = ctx.how
        dy = dy.contiguous().view(x.shape)
        d0, d1 = sums(x, dy, scale, shift, silu)
        d1 = (d1 - mean * d0) * rstd
        k1 = -rstd * rstd * pool(d1 * gamma)
        k0 = -rstd * pool(d0 * gamma) - mean * k1
        return apply(x, dy, scale, shift, k0, k1, silu).view(shape), d1.sum(0), d0.sum(0), None, None


# --------------------------------------------------------------------------------------------------- convolution

@triton.jit(do_not_specialize=["T", "OT", "KT", "shift"])
def conv_kernel(x, w, bias, y, T, H, W, OT, KT, shift, CI: tl.constexpr, CO: tl.constexpr,
                BCI: tl.constexpr, BCO: tl.constexpr, BM: tl.constexpr):
    """KT x 3 x 3, stride 1: output frame t reads the frames t + shift .. t + shift + KT - 1. Before frame 0 stands
    frame 0, after the last one nothing."""
    frame = tl.program_id(1)
    clip, t = frame // OT, frame % OT
    p = tl.program_id(0) * BM + tl.arange(0, BM)
    row, col = p // W, p % W
    ci, co = tl.arange(0, BCI), tl.arange(0, BCO)
    acc = tl.zeros((BM, BCO), tl.float32)
    for k in range(KT):
        ft = tl.maximum(t + k + shift, 0)
        for kh in range(3):
            r = row + kh - 1
            ok = (p < H * W) & (r >= 0) & (r < H) & (p * 0 + ft < T)
            for kw in tl.static_range(3):
                q = col + kw - 1
                m = ok & (q >= 0) & (q < W)
                at = ((clip * T + ft) * H + r) * W + q
                xv = tl.load(x + at[:, None] * CI + ci[None, :], mask=m[:, None] & (ci < CI)[None, :], other=0.0)
                wv = tl.load(w + ((k * 9 + kh * 3 + kw) * CI + ci)[:, None] * CO + co[None, :],
                             mask=(ci < CI)[:, None] & (co < CO)[None, :], other=0.0)
                acc = tl.dot(xv, wv, acc)
    acc += tl.load(bias + co, mask=co < CO, other=0.0)[None, :]
    tl.store(y + (frame * H * W + p)[:, None] * CO + co[None, :], acc.to(y.dtype.element_ty),
             mask=(p < H * W)[:, None] & (co < CO)[None, :])


@triton.jit(do_not_specialize=["frames", "T", "KT"])
def weight_kernel(x, dy, out, frames, T, H, W, KT, CI: tl.constexpr, CO: tl.constexpr,
                  BCI: tl.constexpr, BCO: tl.constexpr, BP: tl.constexpr):
    """The weights' gradient over a part of the pixels, for the three taps of one kernel row."""
    tap, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    k, kh = tap // 3, tap % 3
    ci, co = tl.arange(0, BCI), tl.arange(0, BCO)
    a0, a1, a2 = (tl.zeros((BCI, BCO), tl.float32), tl.zeros((BCI, BCO), tl.float32), tl.zeros((BCI, BCO), tl.float32))
    blocks = tl.cdiv(H * W, BP)
    for i in range(part, frames * blocks, parts):
        frame = i // blocks
        p = (i % blocks) * BP + tl.arange(0, BP)
        ft = tl.maximum(frame % T + k - KT + 1, 0)
        r, col = p // W + kh - 1, p % W
        ok = (p < H * W) & (r >= 0) & (r < H)
        g = tl.load(dy + (frame * H * W + p)[:, None] * CO + co[None, :], mask=(p < H * W)[:, None] & (co < CO)[None, :], other=0.0)
        at = ((frame // T * T + ft) * H + r) * W + col
        cs = (ci < CI)[None, :]
        x0 = tl.load(x + (at - 1)[:, None] * CI + ci[None, :], mask=(ok & (col > 0))[:, None] & cs, other=0.0)
        a0 = tl.dot(tl.trans(x0), g, a0)
        x1 = tl.load(x + at[:, None] * CI + ci[None, :], mask=ok[:, None] & cs, other=0.0)
        a1 = tl.dot(tl.trans(x1), g, a1)
        x2 = tl.load(x + (at + 1)[:, None] * CI + ci[None, :], mask=(ok & (col < W - 1))[:, None] & cs, other=0.0)
        a2 = tl.dot(tl.trans(x2), g, a2)
    to = out + ((part * KT * 9 + tap * 3) * CI + ci)[:, None] * CO + co[None, :]
    m = (ci < CI)[:, None] & (co < CO)[None, :]
    tl.store(to, a0, mask=m)
    tl.store(to + CI * CO, a1, mask=m)
    tl.store(to + 2 * CI * CO, a2, mask=m)


def run_conv(x, w, bias, frames, shift):
    """w: [KT, 3, 3, CI, CO]."""
    b, t, h, width, ci = x.shape
    kt, co = w.shape[0], w.shape[4]
    y = torch.empty(b, frames, h, width, co, device=x.device, dtype=x.dtype)
    bci, bco = at_least_16(ci), at_least_16(co)
    bm = 128 if bci * bco > 512 else 256
    conv_kernel[triton.cdiv(h * width, bm), b * frames](x, w, bias, y, t, h, width, frames, kt, shift, ci, co, bci, bco, bm,
                                                        num_warps=4, num_stages=3 if bci * bco <= 1024 else 2)
    return y


class CausalConv(torch.autograd.Function):
    """x: [B, T, H, W, CI]; weight: [CO, CI, KT, 3, 3] and bias in f32, stride 1, a border of one zero; before frame 0 stands frame 0."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        x = x.contiguous()
        ctx.save_for_backward(x, weight)
        w = weight.to(x.dtype).permute(2, 3, 4, 1, 0).contiguous()
        return run_conv(x, w, bias, x.shape[1], 1 - w.shape[0])

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        dy = dy.contiguous()
        b, t, h, width, ci = x.shape
        co, _, kt, _, _ = weight.shape
        dx = None
        if ctx.needs_input_grad[0]:
            back, zero = weight.flip(2, 3, 4).permute(2, 3, 4, 0, 1), weight.new_zeros(ci)
            dx = run_conv(dy, back.to(dy.dtype).contiguous(), zero, t, 0)
            if kt == 3:  # what went to the frames that frame 0 stood in for
                before = torch.stack([back[1] + back[2], back[2]]).to(dy.dtype)
                dx[:, :1] += run_conv(dy, before, zero, 1, 0)
        parts = max(1, min(b * t * triton.cdiv(h * width, 64), 192 if kt == 1 else 64))
        out = torch.empty(parts, kt, 3, 3, ci, co, device=x.device)
        weight_kernel[kt * 3, parts](x, dy, out, b * t, t, h, width, kt, ci, co, at_least_16(ci), at_least_16(co), 64,
                                     num_warps=4, num_stages=3)
        dw = out.sum(0).permute(4, 3, 0, 1, 2)
        return dx, dw, dy.sum((0, 1, 2, 3), dtype=torch.float32)
