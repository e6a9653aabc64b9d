"""Trains the demo checkpoint: the video autoencoder of this project with small channels.

    python train.py --seconds 420 --out demo.safetensors                 # procedural video alone
    python train.py --seconds 420 --out demo.safetensors --footage footage.npz --test heldout.npz

Needs torch, numpy and safetensors, and a CUDA card for a useful result (without one it runs, slowly: a check of
the code). `--seconds` is the whole run: rendering the material, choosing the quickest kernels, training, and the
evaluation at the end. The learning rate follows the clock, so any length gives a finished checkpoint.
TRAINING.md says how the shipped file was made and what it reaches; footage.py makes the two .npz files.

Written beside OUT: OUT.json (settings, losses, PSNR, latent statistics) and OUT-*.png (input, output, difference).
"""
import argparse
import json
import math
import os
import struct
import time
import zlib

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

EPS = 1e-6  # of every GroupNorm


# ------------------------------------------------------------------------------------------------ the network
#
# Module names spell the tensor names of the checkpoint. Activations are [B, C, T, H, W], stored channels-last.

CONV_AS_2D = False  # set by `Steps.prepare`: 3D convolutions as 2D ones over stacked frames, where that is quicker


def frames(x):
    """[B, C, T, H, W] -> [B * T, C, H, W], a view if x is channels-last."""
    b, c, t, h, w = x.shape
    return x.permute(0, 2, 3, 4, 1).reshape(b * t, h, w, c).permute(0, 3, 1, 2)


def clips(x, b):
    """The way back from `frames`."""
    n, c, h, w = x.shape
    return x.permute(0, 2, 3, 1).reshape(b, n // b, h, w, c).permute(0, 4, 1, 2, 3)


class StackTaps(torch.autograd.Function):
    """The last `taps` frames of each frame, as channels: [B, C, T, H, W] -> [B, taps * C, ceil(T / stride), H, W]."""

    @staticmethod
    def forward(ctx, x, taps, stride):
        ctx.how = x.shape, taps, stride
        x = torch.cat([x[:, :, :1]] * (taps - 1) + [x], dim=2)
        n = (x.shape[2] - taps) // stride + 1
        return torch.cat([x[:, :, k:k + stride * (n - 1) + 1:stride] for k in range(taps)], dim=1)

    @staticmethod
    def backward(ctx, g):
        (b, c, t, h, w), taps, stride = ctx.how
        dx, n = g.new_zeros(b, t + taps - 1, h, w, c).permute(0, 4, 1, 2, 3), g.shape[2]
        for k in range(taps):
            dx[:, :, k:k + stride * (n - 1) + 1:stride] += g[:, k * c:(k + 1) * c]
        dx[:, :, taps - 1] += dx[:, :, :taps - 1].sum(2)
        return dx[:, :, taps - 1:], None, None


class CausalConv(nn.Module):
    """Convolution whose temporal window ends at the current frame; the first frame stands in for what was before."""

    def __init__(self, cin, cout, kernel, stride=(1, 1, 1), corner=False, gain=1.0):
        super().__init__()
        fan_in = cin * math.prod(kernel)
        self.weight = nn.Parameter(torch.randn(cout, cin, *kernel) * gain / math.sqrt(fan_in))
        self.bias = nn.Parameter(torch.zeros(cout))
        self.kernel, self.stride, self.corner = kernel, stride, corner  # corner: pad below and right only

    def forward(self, x):
        w, b = self.weight.to(x.dtype), self.bias.to(x.dtype)
        kt, kh, _ = self.kernel
        if self.corner:
            x, pad = F.pad(x, (0, 1, 0, 1)), 0
        else:
            pad = kh // 2
        if not CONV_AS_2D:
            if kt > 1: x = torch.cat([x[:, :, :1]] * (kt - 1) + [x], dim=2)
            return F.conv3d(x, w.contiguous(memory_format=torch.channels_last_3d), b, self.stride, (0, pad, pad))
        y = frames(StackTaps.apply(x, kt, self.stride[0]) if kt > 1 else x)
        w = w.transpose(1, 2).flatten(1, 2).contiguous(memory_format=torch.channels_last)
        return clips(F.conv2d(y, w, b, self.stride[1:], pad), x.shape[0])


def norm_forward(x, gamma, beta, groups, silu):
    """GroupNorm with the statistics of one frame, then SiLU. Returns the result and what the way back needs."""
    b, c, t, h, w = x.shape
    n = h * w * (c // groups)
    s = x.sum((3, 4), dtype=torch.float32).view(b, groups, -1, t).sum(2, keepdim=True) / n
    q = torch.linalg.vector_norm(x, 2, (3, 4), dtype=torch.float32).square()
    q = q.view(b, groups, -1, t).sum(2, keepdim=True) / n
    rstd = torch.rsqrt((q - s * s).clamp(min=0) + EPS)
    each = (b, groups, c // groups, t)
    mean, rstd = s.expand(each).reshape(b, c, t), rstd.expand(each).reshape(b, c, t)
    scale = gamma[None, :, None] * rstd
    shift = beta[None, :, None] - mean * scale
    y = torch.addcmul(shift[..., None, None].to(x.dtype), x, scale[..., None, None].to(x.dtype))
    return (F.silu(y) if silu else y), mean, rstd


def norm_backward(dy, x, gamma, beta, mean, rstd, groups, silu):
    b, c, t, h, w = x.shape
    scale = gamma[None, :, None] * rstd
    if silu:
        shift = beta[None, :, None] - mean * scale
        y = torch.addcmul(shift[..., None, None].to(x.dtype), x, scale[..., None, None].to(x.dtype))
        sig = torch.sigmoid(y)
        dy = dy * (sig * (1 + y * (1 - sig)))
    d0 = dy.sum((3, 4), dtype=torch.float32)
    d1 = ((dy * x).sum((3, 4), dtype=torch.float32) - mean * d0) * rstd
    pool = lambda v: (v * gamma[None, :, None]).view(b, groups, -1, t).sum(2, keepdim=True) \
        .expand(b, groups, c // groups, t).reshape(b, c, t) / (h * w * (c // groups))
    a0, a1 = pool(d0), pool(d1)
    k1 = -rstd * rstd * a1
    k0 = -rstd * a0 - mean * k1
    wide = lambda v: v[..., None, None].to(x.dtype)
    dx = torch.addcmul(torch.addcmul(wide(k0), x, wide(k1)), dy, wide(scale))
    return dx, d1.sum((0, 2)), d0.sum((0, 2))


class FrameNormFn(torch.autograd.Function):
    """Hand-written gradient: what autograd would keep and recompute here is most of the memory traffic of a step."""

    @staticmethod
    def forward(ctx, x, gamma, beta, groups, silu):
        y, mean, rstd = norm_forward(x, gamma, beta, groups, silu)
        ctx.save_for_backward(x, gamma, beta, mean, rstd)
        ctx.how = groups, silu
        return y

    @staticmethod
    def backward(ctx, dy):
        return *norm_backward(dy, *ctx.saved_tensors, *ctx.how), None, None


class FrameNorm(nn.Module):
    def __init__(self, channels, groups, silu=True):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))
        self.groups, self.silu = groups, silu

    def forward(self, x):
        return FrameNormFn.apply(x, self.weight, self.bias, self.groups, self.silu)


class ResnetBlock(nn.Module):
    def __init__(self, cin, cout, groups):
        super().__init__()
        self.norm1, self.conv1 = FrameNorm(cin, groups), CausalConv(cin, cout, (3, 3, 3))
        self.norm2, self.conv2 = FrameNorm(cout, groups), CausalConv(cout, cout, (3, 3, 3), gain=0.01)
        self.conv_shortcut = CausalConv(cin, cout, (1, 1, 1)) if cin != cout else None

    def forward(self, x):
        h = self.conv2(self.norm2(self.conv1(self.norm1(x))))
        return (x if self.conv_shortcut is None else self.conv_shortcut(x)) + h


class Attention(nn.Module):
    """Single head over the pixels of each frame, added to its input."""

    def __init__(self, c, groups):
        super().__init__()
        self.group_norm = FrameNorm(c, groups, silu=False)
        self.to_q, self.to_k, self.to_v = nn.Linear(c, c), nn.Linear(c, c), nn.Linear(c, c)
        self.to_out = nn.ModuleList([nn.Linear(c, c)])
        for m in (self.to_q, self.to_k, self.to_v, self.to_out[0]): nn.init.zeros_(m.bias)
        nn.init.normal_(self.to_out[0].weight, std=0.01 / math.sqrt(c))

    def forward(self, x):
        b, c, t, h, w = x.shape
        y = self.group_norm(x).permute(0, 2, 3, 4, 1).reshape(b * t, 1, h * w, c)
        lin = lambda m, v: F.linear(v, m.weight.to(v.dtype), m.bias.to(v.dtype))
        y = F.scaled_dot_product_attention(lin(self.to_q, y), lin(self.to_k, y), lin(self.to_v, y))
        return x + lin(self.to_out[0], y).reshape(b, t, h, w, c).permute(0, 4, 1, 2, 3)


class MidBlock(nn.Module):
    def __init__(self, c, groups):
        super().__init__()
        self.resnets = nn.ModuleList([ResnetBlock(c, c, groups), ResnetBlock(c, c, groups)])
        self.attentions = nn.ModuleList([Attention(c, groups)])

    def forward(self, x):
        return self.resnets[1](self.attentions[0](self.resnets[0](x)))


class Downsample(nn.Module):
    def __init__(self, c, temporal):
        super().__init__()
        self.conv = CausalConv(c, c, (3 if temporal else 1, 3, 3), (2 if temporal else 1, 2, 2), corner=True)

    def forward(self, x):
        return self.conv(x)


class Upsample(nn.Module):
    """Each pixel makes its own 2x2 (and, in time, 2) patch by a 1x1 convolution; a 3x3x3 convolution joins them up."""

    def __init__(self, c, temporal):
        super().__init__()
        self.z = 2 if temporal else 1
        self.upscale_conv, self.conv = CausalConv(c, c * 4 * self.z, (1, 1, 1)), CausalConv(c, c, (3, 3, 3))

    def forward(self, x):
        b, c, t, h, w = x.shape
        y = self.upscale_conv(x).permute(0, 2, 3, 4, 1).reshape(b, t, h, w, 2, 2, self.z, c)
        y = y.permute(0, 1, 6, 2, 4, 3, 5, 7).reshape(b, t * self.z, h * 2, w * 2, c)
        if self.z == 2:  # the first latent frame stands for one frame, so its second copy goes
            y = torch.cat([y[:, :1], y[:, 2:]], dim=1)
        return self.conv(y.permute(0, 4, 1, 2, 3))


class Level(nn.Module):
    def __init__(self, cin, cout, blocks, groups, down=None, up=None):
        super().__init__()
        self.resnets = nn.ModuleList([ResnetBlock(cin if j == 0 else cout, cout, groups) for j in range(blocks)])
        if down is not None: self.downsamplers = nn.ModuleList([Downsample(cout, down)])
        if up is not None: self.upsamplers = nn.ModuleList([Upsample(cout, up)])

    def forward(self, x):
        for part in self.children():
            for m in part:
                x = m(x)
        return x


class Encoder(nn.Module):
    def __init__(self, ch, layers, groups, latent, temporal):
        super().__init__()
        last = len(ch) - 1
        self.conv_in = CausalConv(3, ch[0], (3, 3, 3))
        self.down_blocks = nn.ModuleList([
            Level(ch[max(i - 1, 0)], ch[i], layers, groups, down=i >= last - temporal if i < last else None)
            for i in range(last + 1)])
        self.mid_block = MidBlock(ch[-1], groups)
        self.conv_norm_out, self.conv_out = FrameNorm(ch[-1], groups), CausalConv(ch[-1], 2 * latent, (3, 3, 3))

    def forward(self, x):
        x = self.conv_in(x)
        for level in self.down_blocks: x = level(x)
        mean, logvar = self.conv_out(self.conv_norm_out(self.mid_block(x))).float().chunk(2, dim=1)
        return mean, logvar.clamp(-30, 20)


class Decoder(nn.Module):
    def __init__(self, ch, layers, groups, latent, temporal):
        super().__init__()
        last, ch = len(ch) - 1, ch[::-1]
        self.conv_in, self.mid_block = CausalConv(latent, ch[0], (3, 3, 3)), MidBlock(ch[0], groups)
        self.up_blocks = nn.ModuleList([
            Level(ch[max(i - 1, 0)], ch[i], layers + 1, groups, up=i < temporal if i < last else None)
            for i in range(last + 1)])
        self.conv_norm_out, self.conv_out = FrameNorm(ch[-1], groups), CausalConv(ch[-1], 3, (3, 3, 3))

    def forward(self, z):
        x = self.mid_block(self.conv_in(z))
        for level in self.up_blocks: x = level(x)
        return self.conv_out(self.conv_norm_out(x))


class VideoVae(nn.Module):
    def __init__(self, channels=(16, 32, 64, 80), layers=1, groups=4, latent=16, temporal=2):
        super().__init__()
        self.encoder = Encoder(list(channels), layers, groups, latent, temporal)
        self.decoder = Decoder(list(channels), layers, groups, latent, temporal)


# ------------------------------------------------------------------------------------------- procedural video
#
# Random numbers come from numpy, so a seed gives the same scene on every device; only the drawing is done there.

def tone(t, rng):
    """Random contrast and colour balance; keeps [n, 3, s, s] in 0..1."""
    n = len(t)
    gain = torch.from_numpy(rng.uniform(0.25, 1.0, (n, 1, 1, 1)).astype("f4")).to(t.device)
    mid = torch.from_numpy(0.1 + 0.8 * colours(rng, n)).view(n, 3, 1, 1).to(t.device)
    return (mid + gain * (t - 0.5)).clamp(0, 1)


def colours(rng, *shape):
    """Random RGB [*shape, 3], from grey to fully saturated."""
    c = rng.random((*shape, 3))
    grey = c.mean(-1, keepdims=True)
    return (grey + (c - grey) * rng.random((*shape, 1))).astype("f4")


def clouds(rng, n, s, device):
    """Noise with a 1/f^a spectrum: what photographs look like to a linear filter. About 0..1."""
    f = torch.fft.fftfreq(s, device=device)
    f = torch.sqrt(f[:, None] ** 2 + f[None, :s] ** 2).clamp(min=1 / s)
    a = torch.from_numpy(rng.uniform(1.2, 2.4, (n, 1, 1, 1)).astype("f4")).to(device)
    x = torch.from_numpy(rng.standard_normal((n, 3, s, s), dtype="f4")).to(device)
    x = torch.fft.ifft2(torch.fft.fft2(x) * f ** -a).real
    x = x / x.std((2, 3), keepdim=True)
    grey = torch.from_numpy(rng.uniform(0.5, 1.0, (n, 1, 1, 1)).astype("f4")).to(device)  # channels mostly agree
    return (0.5 + 0.2 * (grey * x[:, :1] + (1 - grey) * x)).clamp(0, 1)


def cells(rng, n, s, device):
    """Voronoi cells on a torus, one colour each."""
    out = []
    g = torch.arange(s, device=device) / s
    for _ in range(n):
        k = int(8 * 60 ** rng.random())
        p = torch.from_numpy(rng.random((k, 2), dtype="f4")).to(device)
        col = torch.from_numpy(colours(rng, k)).to(device)
        d = [(g[:, None] - p[None, :, i] + 0.5).remainder(1) - 0.5 for i in (0, 1)]
        d2 = d[0][:, None, :] ** 2 + d[1][None, :, :] ** 2
        wgt = torch.softmax(-d2 * s * math.sqrt(k) * 6, dim=-1)  # soft by about a pixel
        out.append((wgt @ col).permute(2, 0, 1))
    return torch.stack(out)


def patterns(rng, n, s, device):
    """Checkerboards, stripes, plaids and dots with edges a pixel wide."""
    g = torch.arange(s, device=device) / s * 2 * math.pi
    out = []
    for _ in range(n):
        u, v = (int(k) for k in rng.integers(1, s // 10, 2))
        a, b = torch.sin(u * g)[None, :].expand(s, s), torch.sin(v * g)[:, None].expand(s, s)
        kind = rng.integers(4)
        m = (a * b * 2, a + 0 * b, (a + b) / 2, a + b - 0.8)[kind]
        m = (0.5 + m * s / (max(u, v) * 8) * rng.uniform(0.3, 1)).clamp(0, 1)
        c = torch.from_numpy(colours(rng, 2)).view(2, 3, 1, 1).to(device)
        out.append(c[0] * (1 - m) + c[1] * m)
    return torch.stack(out)


def glyphs(rng, n, s, device):
    """Pages of letter-like signs: strokes between the points of a 3 x 4 grid, in lines of words."""
    up, out = 4, []
    for _ in range(n):
        img = np.zeros((s * up, s * up), "f4")
        size = int(rng.integers(8, 28))
        thick = max(1, int(size * up * rng.uniform(0.08, 0.2)))
        alphabet = [rng.integers(0, [3, 4, 3, 4], (int(rng.integers(2, 5)), 4)) for _ in range(24)]
        cell_w, cell_h = size * 0.45, size * 0.6
        y = size * 0.3
        while y + size < s:
            x = size * rng.uniform(0.3, 2)
            while x + size < s:
                if rng.random() < 0.82:
                    for x0, y0, x1, y1 in alphabet[rng.integers(24)]:
                        steps = int(size * up * 0.8)
                        px = ((x + np.linspace(x0, x1, steps) * cell_w / 2) * up).astype(int)
                        py = ((y + np.linspace(y0, y1, steps) * cell_h / 3) * up).astype(int)
                        for i in range(thick):
                            img[(py + i)[:, None], px[:, None] + np.arange(thick)] = 1
                x += cell_w * 1.4
            y += size * rng.uniform(1.0, 1.5)
        m = F.avg_pool2d(torch.from_numpy(img)[None].to(device), up)
        c = torch.from_numpy(colours(rng, 2)).view(2, 3, 1, 1).to(device)
        out.append(c[0] * (1 - m) + c[1] * m)
    return torch.stack(out)


def photos(rng, n, s, device, stills):
    """Squares cut out of photographs at different scales."""
    out = []
    for _ in range(n):
        img = stills[rng.integers(len(stills))]
        h, w = img.shape[:2]
        side = int(min(h, w) * rng.uniform(0.45, 1.0))
        y, x = int(rng.integers(h - side + 1)), int(rng.integers(w - side + 1))
        cut = torch.from_numpy(np.ascontiguousarray(img[y:y + side, x:x + side])).to(device)
        cut = cut.permute(2, 0, 1)[None].float() / 255
        out.append(F.interpolate(cut, (s, s), mode="bilinear", antialias=True, align_corners=False)[0])
    return torch.stack(out)


def texture_bank(rng, n, device, stills=(), s=256):
    """About n textures [n, 3, s, s] in 0..1. With photographs given, half of them are cut from those."""
    k = n // (10 if stills else 5)
    marble = clouds(rng, k, s, device)
    marble = 0.5 + 0.5 * torch.sin((marble + 3 * marble[:, :1]) / 4 * torch.from_numpy(rng.uniform(5, 25, (k, 1, 1, 1)).astype("f4")).to(device))
    made = [clouds(rng, k, s, device), marble, cells(rng, k, s, device), patterns(rng, k, s, device)]
    bank = [tone(torch.cat(made), rng), glyphs(rng, k, s, device)]
    if stills:
        p = photos(rng, n - 5 * k, s, device, stills)
        bank += [p[: len(p) // 2], tone(p[len(p) // 2:], rng)]
    return torch.cat(bank).clamp(0, 1)


def render(rng, n, bank, t=17, size=256, shapes=24):
    """n clips [n, 3, t, size, size] in 0..1: a textured or graded ground and moving shapes, under a moving camera."""
    device = bank.device
    put = lambda a: torch.from_numpy(np.asarray(a, "f4")).to(device)
    over = lambda a: put(a).view(n, *[1] * 3)  # one number a clip
    speed = rng.exponential(1.3, n) * (rng.random(n) > 0.12)  # pixels a frame; 12 % of the clips stand still
    moving = speed > 0
    time_ = torch.arange(t, device=device, dtype=torch.float32).view(1, t, 1, 1)

    # Camera: pan with a wobble, zoom, rotation. Coordinates are pixels from the middle of the picture.
    axis = torch.arange(size, device=device) - (size - 1) / 2
    py, px = axis.view(1, 1, size, 1), axis.view(1, 1, 1, size)
    way = rng.uniform(0, 2 * math.pi, n)
    zoom = torch.exp(over(rng.uniform(-0.25, 0.25, n)) + over(moving * rng.normal(0, 0.006, n)) * time_)
    turn = over(rng.uniform(-0.3, 0.3, n)) + over(moving * rng.normal(0, 0.006, n) * (rng.random(n) < 0.5)) * time_
    wob = over(moving * rng.exponential(0.7, n)) * torch.sin(over(rng.uniform(0.1, 0.8, n)) * time_)
    cam_x, cam_y = over(speed * np.cos(way)) * time_ + wob, over(speed * np.sin(way)) * time_ - wob
    cs, sn = torch.cos(turn) * zoom, torch.sin(turn) * zoom
    wx, wy = cs * px - sn * py + cam_x, sn * px + cs * py + cam_y

    def textured(x, y, scale):
        tex = bank[torch.from_numpy(rng.integers(0, len(bank), n)).to(device)]
        ox, oy = over(rng.uniform(-1, 1, n)), over(rng.uniform(-1, 1, n))
        half = bank.shape[-1] / 2
        grid = torch.stack([x / (half * scale) + ox, y / (half * scale) + oy], dim=-1).view(n, t * size, size, 2)
        out = F.grid_sample(tex, grid, mode="bilinear", padding_mode="reflection", align_corners=False)
        return out.view(n, 3, t, size, size)

    def graded(x, y, reach):
        c = put(colours(rng, 2, n)).view(2, n, 3, 1, 1, 1)
        a = rng.uniform(0, 2 * math.pi, n)
        m = (0.5 + (over(np.cos(a)) * x + over(np.sin(a)) * y) / (2 * reach)).clamp(0, 1)[:, None]
        return c[0] + (c[1] - c[0]) * m

    plain = over(rng.random(n) < 0.25)[:, None]
    video = textured(wx, wy, over(np.exp(rng.uniform(-0.2, 0.9, n)))) * (1 - plain) + graded(wx, wy, size * 0.7) * plain

    # Shapes, later ones on top. Radii follow a power law, as in the dead-leaves model of natural pictures.
    count = rng.integers(0, shapes + 1, n)
    for k in range(shapes):
        shown = k < count
        if not shown.any(): break
        r = size * 0.4 * (0.08 + 0.92 * rng.power(0.6, n)) if k < 4 else np.minimum(5 / rng.random(n) ** 0.9, size * 0.25)
        v = rng.exponential(1.2, n) * moving * (rng.random(n) < 0.7)
        a, spin = rng.uniform(0, 2 * math.pi, n), rng.normal(0, 0.02, n) * moving
        aspect = np.exp(rng.uniform(-0.9, 0.9, n))
        x = wx - over(rng.uniform(-0.65, 0.65, n) * size) - over(v * np.cos(a)) * time_
        y = wy - over(rng.uniform(-0.65, 0.65, n) * size) - over(v * np.sin(a)) * time_
        angle = over(rng.uniform(0, 2 * math.pi, n)) + over(spin) * time_
        cs, sn = torch.cos(angle), torch.sin(angle)
        x, y = cs * x - sn * y, sn * x + cs * y
        rx, ry = over(r), over(np.clip(r * aspect, 2, size * 0.5))
        kind = rng.integers(5)  # one kind of outline for the whole batch, one distance field to compute
        if kind == 0:    # ellipse
            dist = (torch.sqrt((x / rx) ** 2 + (y / ry) ** 2) - 1) * torch.minimum(rx, ry)
        elif kind == 1:  # rounded box
            corner = torch.minimum(rx, ry) * float(rng.uniform(0, 0.6))
            qx, qy = x.abs() - rx + corner, y.abs() - ry + corner
            dist = torch.sqrt(qx.clamp(min=0) ** 2 + qy.clamp(min=0) ** 2) + torch.maximum(qx, qy).clamp(max=0) - corner
        elif kind == 2:  # flower or star
            rad = torch.sqrt(x * x + y * y)
            dist = rad - rx * (1 + float(rng.uniform(0.1, 0.4)) * torch.cos(int(rng.integers(3, 8)) * torch.atan2(y, x)))
        elif kind == 3:  # ring
            dist = (torch.sqrt(x * x + y * y) - rx).abs() - rx * float(rng.uniform(0.08, 0.3)) - 0.7
        else:            # triangle
            dist = torch.maximum(x.abs() * 0.866 + y * 0.5, -y) - rx * 0.6
        soft = over(np.where(rng.random(n) < 0.8, 1.0, rng.uniform(1, 8, n)))  # a fifth are out of focus
        alpha = (0.5 - dist / (soft * zoom)).clamp(0, 1) * over(shown * np.where(rng.random(n) < 0.85, 1, 0.5))
        fill = textured(x, y, over(np.exp(rng.uniform(-0.3, 0.7, n)))) if rng.random() < 0.5 else graded(x, y, rx * 2)
        video += alpha[:, None] * (fill - video)

    # What happens to a film afterwards: fades, cuts and cross-fades to another clip, lens blur, light, grain.
    mix = torch.zeros(n, 1, t, 1, 1, device=device)
    for i in np.flatnonzero(rng.random(n) < 0.12):
        start, length = rng.uniform(0, t), rng.choice([0.01, 4, t])
        mix[i, 0, :, 0, 0] = ((time_.flatten() - start) / length).clamp(0, 1)
    video = video + mix * (video.roll(1, 0) - video)
    light = 1 + put(moving * rng.normal(0, 0.01, n) * (rng.random(n) < 0.3)).view(n, 1, 1, 1, 1) * time_[:, None]
    video = (video * light * put(rng.uniform(0.6, 1.1, n)).view(n, 1, 1, 1, 1)).clamp(0, 1)
    blur = put(rng.uniform(0, 0.25, n) * (rng.random(n) < 0.6)).view(n, 1, 1, 1, 1)
    for dim in (3, 4):
        lo, hi = video.narrow(dim, 0, size - 1), video.narrow(dim, 1, size - 1)
        left = torch.cat([video.narrow(dim, 0, 1), lo], dim)
        right = torch.cat([hi, video.narrow(dim, size - 1, 1)], dim)
        video = video * (1 - 2 * blur) + blur * (left + right)
    seed = int(rng.integers(1 << 31))
    grain = put(rng.exponential(0.006, n) * (rng.random(n) < 0.4)).view(n, 1, 1, 1, 1)
    noise = torch.randn(video.shape, generator=torch.Generator(device).manual_seed(seed), device=device)
    return (video + grain * noise).clamp(0, 1)


def clock(device):
    if device.type == "cuda": torch.cuda.synchronize()
    return time.time()


def bytes_of(video):
    return (video * 255).round().to(torch.uint8)


def held_out(n, device):
    """The procedural test clips: seeds that training never uses, textures without photographs."""
    rng = np.random.default_rng(987654321)
    bank = texture_bank(rng, 40, device)
    return bytes_of(torch.cat([render(rng, 4, bank) for _ in range(-(-n // 4))])[:n])


class Material:
    """A pool of clips on the device; batches are random cuts of it, mirrored, turned, recoloured, played backwards."""

    def __init__(self, count, size, seed, device, footage, deadline):
        self.rng, self.device, self.films = np.random.default_rng(seed), device, []
        stills = []
        if footage:
            with np.load(footage) as z:
                stills = [z[k] for k in z.files if k.startswith("image")]
                for k in (k for k in z.files if k.startswith("clip")):
                    film = torch.from_numpy(z[k]).to(device)  # [T, H, W, 3]
                    self.films.append(film.permute(3, 0, 1, 2).contiguous())
                    stills += [z[k][0], z[k][-1]]
        bank = texture_bank(self.rng, min(320, max(20, count)), device, stills)
        self.perms = torch.tensor([[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]], device=device)
        self.pool, chunk = torch.empty(count, 3, 17, size, size, dtype=torch.uint8, device=device), 16
        for i in range(0, count, chunk):
            self.pool[i:i + chunk] = bytes_of(render(self.rng, min(chunk, count - i), bank, size=size))
            clock(device)
            if time.time() > deadline:  # a slow card trains on a smaller pool
                self.pool = self.pool[:i + chunk]
                break

    def batch(self, b, t, size):
        """[b, 3, t, size, size], u8."""
        rng, out = self.rng, []
        for _ in range(b):
            real = self.films and rng.random() < 0.08
            src = self.films[rng.integers(len(self.films))] if real else self.pool[rng.integers(len(self.pool))]
            _, st, sh, sw = src.shape
            t0, y0, x0 = (int(rng.integers(0, a - d + 1)) for a, d in ((st, t), (sh, size), (sw, size)))
            x = src[:, t0:t0 + t, y0:y0 + size, x0:x0 + size]
            if rng.random() < 0.5: x = x.flip(3)
            if rng.random() < 0.2: x = x.flip(2)
            if rng.random() < 0.2: x = x.transpose(2, 3)
            if rng.random() < 0.5: x = x.flip(1)
            if rng.random() < 0.3: x = x[self.perms[rng.integers(6)]]
            out.append(x)
        return torch.stack(out)


# ---------------------------------------------------------------------------------------------------- the start
#
# A random network of this kind passes on little but local brightness, and learns colour and motion late. So training
# starts from the best linear code instead: the path that skips the residual blocks is set to a tree of principal
# components, fitted to the material level by level, and the decoder's path to its transpose.

def blocks_of(x, z):
    """[B, C, T, H, W] -> [N, (z, 2, 2, C)]: the 2 x 2 (and, in time, 2) blocks that one step down joins."""
    b, c, t, h, w = x.shape
    if z == 2: x = torch.cat([x[:, :, :1], x], dim=2)  # frame 0 is coded alone, like a pair of equal frames
    x = x.reshape(b, c, -1, z, h // 2, 2, w // 2, 2).permute(0, 2, 4, 6, 3, 5, 7, 1)
    return x.reshape(*x.shape[:4], -1)


@torch.no_grad()
def linear_start(model, x, groups, latent=16):
    """Sets the weights; x: u8 clips to fit to. In every layer the first `n` channels carry the code, the others start
    as random features of it.

    SiLU stands at the end of both paths, and silu(u) - silu(-u) = u: there, the code goes through as pairs +u, -u.
    The norm before it would take away a frame's contrast: a pair of large constants in each group keeps the scale."""
    enc, dec = model.encoder, model.decoder

    def copy(conv, rows, n_in, keep=0.3):
        """Output channels < len(rows) become the given mix of input channels < n_in at the same place and time."""
        w = conv.weight
        w *= keep
        w[:len(rows)] = 0
        w[:len(rows), :n_in, -1, w.shape[3] // 2, w.shape[4] // 2] = rows

    def settle(conv, got, want):
        """Corrects a layer's gain and bias, channel by channel, to what the norm before it really divides by."""
        got, want = (v.transpose(0, 1).flatten(1) for v in (got, want))
        g0, w0 = got.mean(1, keepdim=True), want.mean(1, keepdim=True)
        gain = ((got - g0) * (want - w0)).mean(1) / (got - g0).square().mean(1)
        n = len(got)
        conv.weight[:n] *= gain.view(-1, 1, 1, 1, 1)
        conv.bias[:n] = (conv.bias[:n] - g0[:, 0]) * gain + w0[:, 0]

    def split(short, rows, bias, constant):
        """Lets a shortcut give each row as a pair, after a pair of constants in each group; returns the pairs' places."""
        size = short.weight.shape[0] // groups
        firsts = [c for c in range(0, short.weight.shape[0], 2) if c % size > 0][:len(rows)]
        used = range(firsts[-1] + 2)
        short.weight *= 0.3
        short.weight[used] = 0
        for c, row, b in zip(firsts, rows, bias):
            short.weight[c, :len(row), 0, 0, 0], short.weight[c + 1, :len(row), 0, 0, 0] = row, -row
            short.bias[c], short.bias[c + 1] = b, -b
        for c in used[::size]: short.bias[c], short.bias[c + 1] = constant, -constant
        return firsts

    def join(conv, firsts, keep):
        """Lets a layer take the pairs together again."""
        conv.weight *= keep
        conv.weight[:len(firsts)] = 0
        for i, c in enumerate(firsts):
            conv.weight[i, c, -1, 1, 1], conv.weight[i, c + 1, -1, 1, 1] = 1, -1

    eye = lambda n: torch.eye(n, device=x.device)

    copy(enc.conv_in, eye(3), 3)
    video = (x.float() / 127.5 - 1).contiguous(memory_format=torch.channels_last_3d)
    h, n, tree = video, 3, []
    for i, level in enumerate(enc.down_blocks):
        res = level.resnets[0]
        if i < len(enc.down_blocks) - 1:
            if res.conv_shortcut: copy(res.conv_shortcut, eye(n), n)
            conv = level.downsamplers[0].conv
            z = conv.stride[0]
            p = blocks_of(h, z)
            flat = p.flatten(0, 3)
            keep = min(conv.weight.shape[0], flat.shape[1])
            e = torch.linalg.eigh((flat.T @ flat).double().cpu())[1].flip(1)[:, :keep].T.float().to(x.device)
            root = math.sqrt(4 * z)
            conv.weight *= 0.3
            conv.weight[:keep] = 0
            taps = (e / root).view(keep, z, 2, 2, n).permute(0, 4, 1, 2, 3)
            conv.weight[:keep, :n, -z:, :2, :2] = taps
            h = (p @ (e.T / root)).permute(0, 4, 1, 2, 3)
            tree.append((e * root, z, n, keep))
            n = keep
        else:
            e = torch.linalg.eigh(torch.cov(h.transpose(0, 1).flatten(1).double().cpu()))
            e, power = e[1].flip(1)[:, :latent].T.float().to(x.device), e[0].flip(0)[:latent].float().to(x.device)
            mean = e @ h.mean((0, 2, 3, 4))
            scale = power.sqrt()
            firsts = split(res.conv_shortcut, e / scale[:, None], -mean / scale, 10)
    join(enc.conv_out, firsts, 0.1)
    enc.conv_out.bias[latent:] = -5  # little noise at first
    code = torch.einsum("kc,bcthw->bkthw", e / scale[:, None], h) - (mean / scale).view(1, -1, 1, 1, 1)
    settle(enc.conv_out, enc(video)[0], code)

    copy(dec.conv_in, (e * scale[:, None]).T, latent)
    dec.conv_in.bias[:n] = e.T @ mean
    for i, level in enumerate(dec.up_blocks):
        short = level.resnets[0].conv_shortcut
        if i < len(dec.up_blocks) - 1:
            if short: copy(short, eye(n), n)
            e, z, below, keep = tree.pop()
            up = level.upsamplers[0]
            w = up.upscale_conv.weight.view(2, 2, z, -1, up.upscale_conv.weight.shape[1])
            w *= 0.3
            w[:, :, :, :below] = 0
            w[:, :, :, :below, :keep] = e.view(keep, z, 2, 2, below).permute(2, 3, 1, 4, 0)
            n = below
            copy(up.conv, eye(n), n)
        else:
            join(dec.conv_out, split(short, eye(3), [0, 0, 0], 4), 0)
    settle(dec.conv_out, dec(code), video)


# --------------------------------------------------------------------------------------------------- training

def loss_of(model, x, dtype, kl_weight):
    """x: u8 [B, 3, T, H, W]. The loss, and [rms error, KL, deviation of the latent] to watch."""
    x = (x.float() / 127.5 - 1).contiguous(memory_format=torch.channels_last_3d)
    mean, logvar = model.encoder(x.to(dtype))
    z = mean + torch.exp(0.5 * logvar) * torch.randn_like(mean)
    e = model.decoder(z.to(dtype).contiguous(memory_format=torch.channels_last_3d)).float() - x
    rms = (e.square().mean((1, 2, 3, 4)) + 1e-6).sqrt().mean()  # what PSNR measures, each clip on its own scale
    edge = sum((e.narrow(d, 1, e.shape[d] - 1) - e.narrow(d, 0, e.shape[d] - 1)).abs().mean() for d in (3, 4))
    kl = 0.5 * (mean.square() + logvar.exp() - 1 - logvar).mean()
    loss = e.abs().mean() + rms + 0.25 * edge + kl_weight * kl
    return loss, torch.stack([loss, rms, kl, mean.std()]).detach()


class Steps:
    """Training steps for a few batch shapes; on a GPU each shape's step is captured once as a graph and replayed."""

    def __init__(self, a, model, device):
        self.a, self.model, self.device = a, model, device
        self.gpu, self.dtype = device.type == "cuda", torch.bfloat16
        self.lr = torch.tensor(1e-6, device=device)
        self.opt = torch.optim.AdamW(model.parameters(), lr=self.lr, betas=(0.9, 0.98), weight_decay=1e-3,
                                     fused=self.gpu or None, capturable=self.gpu)
        self.ema = {k: v.detach().clone() for k, v in model.named_parameters()}
        self.graphs = {}

    def eager(self, x):
        self.opt.zero_grad(set_to_none=True)
        loss, parts = loss_of(self.model, x, self.dtype, self.a.kl)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for v in self.model.parameters(): v.grad.nan_to_num_(0, 0, 0)  # one bad batch must not end the run
        self.opt.step()
        with torch.no_grad():
            torch._foreach_lerp_(list(self.ema.values()), list(self.model.parameters()), 1 - self.a.ema)
        return parts

    def capture(self, x):
        """Three steps to settle kernels and optimizer state, then one recorded."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3): self.eager(x)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        self.opt.zero_grad(set_to_none=True)
        with torch.cuda.graph(graph):
            parts = self.eager(x)
        self.graphs[x.shape] = graph, x, parts

    def prepare(self, batches, log):
        """Graphs for these batches' shapes. The first is tried with both kinds of convolution; the quicker one stays."""
        global CONV_AS_2D
        took = {}
        for CONV_AS_2D in (False, True):
            self.capture(batches[0])
            began = clock(self.device)
            for _ in range(5): self(batches[0])
            took[CONV_AS_2D] = (clock(self.device) - began) / 5
            log(f"{'stacked 2D' if CONV_AS_2D else '3D'} convolutions: {took[CONV_AS_2D] * 1e3:.1f} ms a step, "
                f"{batches[0][:, 0].numel() / took[CONV_AS_2D] / 1e6:.0f} Mpixel/s")
        CONV_AS_2D = bool(took[True] < took[False])
        for x in batches[CONV_AS_2D:]: self.capture(x)  # where 2D won, the first graph is already right

    def __call__(self, x):
        if x.shape not in self.graphs: return self.eager(x)
        graph, buffer, parts = self.graphs[x.shape]
        buffer.copy_(x)
        graph.replay()
        return parts


def train(a, model, material, device, log, started):
    # (share of the steps, clips, frames, side). Norms and attention cover a whole frame, so the sides must vary;
    # a still picture needs no turn of its own, since the first frame of every clip is coded as one.
    global CONV_AS_2D
    fit = lambda t, s: max(1, round(a.pixels / (t * s * s)))
    if device.type == "cuda":
        shapes = [(0.6, fit(17, 128), 17, 128), (0.4, fit(9, 256), 9, 256)]
    else:
        shapes = [(0.4, fit(5, 64), 5, 64), (0.2, fit(17, 64), 17, 64), (0.2, fit(5, 128), 5, 128), (0.2, fit(1, 256), 1, 256)]
    if a.start:
        model.load_state_dict({k: v.float() for k, v in load_file(a.start).items()})
    else:
        linear_start(model, torch.cat([material.batch(4, 17, 128) for _ in range(16 if device.type == "cuda" else 3)]), a.groups)
    steps = Steps(a, model, device)
    if steps.gpu:
        try:
            steps.prepare([material.batch(*s[1:]) for s in shapes], log)
        except RuntimeError as e:
            log(f"no graphs on this machine, plain steps instead: {e}")
            steps.graphs.clear()
    else:
        CONV_AS_2D = True  # by far the quicker way on a CPU with bf16
    rng, step, begin, saved, curve = np.random.default_rng(a.seed + 1), 0, time.time(), time.time(), []
    span = max(1.0, started + a.seconds - a.reserve - begin)
    log(f"training for {span:.0f} s, batches {[s[1:] for s in shapes]}")
    while (done := (time.time() - begin) / span) < 1 and step < a.steps:
        steps.lr.fill_(a.lr * min(1, (step + 1) / 300) * (0.5 + 0.5 * math.cos(math.pi * done)) + 1e-7)
        _, b, t, size = shapes[rng.choice(len(shapes), p=[s[0] for s in shapes])]
        parts = steps(material.batch(b, t, size))
        step += 1
        if step % a.every == 0 or step in (1, 10, 50):
            loss, rms, kl, std = parts.tolist()
            curve.append([step, round(time.time() - begin, 1), size, round(loss, 5), round(20 * math.log10(2 / rms), 3),
                          round(kl, 3), round(std, 3)])
            log("step {} at {} s, side {}: loss {}, {} dB, KL {}, latent std {}".format(*curve[-1]))
            if not math.isfinite(loss): raise SystemExit("the loss is not finite: try a lower --lr")
        if time.time() - saved > 60:
            export(a, steps.ema, a.out)
            saved = time.time()
    return steps.ema, step, clock(device) - begin, curve


def unit_latent(w, model, material, latent=16):
    """Rescales each latent channel to unit deviation, in the encoder's last and the decoder's first convolution.

    The reconstruction stays what it is: the two factors cancel."""
    model.load_state_dict(w)
    with torch.no_grad():
        scaled = lambda x: (x.float() / 127.5 - 1).contiguous(memory_format=torch.channels_last_3d)
        mean = torch.cat([model.encoder(scaled(material.batch(2, 17, material.pool.shape[-1])))[0] for _ in range(12)])
    s = mean.std((0, 2, 3, 4))
    w = {k: v.clone() for k, v in w.items()}
    w["encoder.conv_out.weight"][:latent] /= s.view(-1, 1, 1, 1, 1)
    w["encoder.conv_out.bias"][:latent] /= s
    w["encoder.conv_out.bias"][latent:] -= 2 * s.log()
    w["decoder.conv_in.weight"] *= s.view(1, -1, 1, 1, 1)
    return w


def export(a, weights, path):
    """f16, under the checkpoint's names, with the number of groups that the shapes do not tell."""
    half = {k: v.detach().to("cpu", torch.float16).contiguous() for k, v in weights.items()}
    save_file(half, path + ".part", metadata={"norm_num_groups": str(a.groups), "format": "pt"})
    os.replace(path + ".part", path)
    return half


# ------------------------------------------------------------------------------------------------- evaluation

def write_png(path, rgb):
    h, w, _ = rgb.shape
    raw = b"".join(b"\0" + rgb[y].tobytes() for y in range(h))
    part = lambda k, d: struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d))
    with open(path, "wb") as f:
        f.write(b"\x89PNG\r\n\x1a\n" + part(b"IHDR", struct.pack(">IIBBBBB", w, h, 8, 2, 0, 0, 0))
                + part(b"IDAT", zlib.compress(raw, 6)) + part(b"IEND", b""))


@torch.no_grad()
def evaluate(model, clips_u8, png=None):
    """PSNR of each clip [3, T, H, W] (u8) through the mean of the latent, in f32, and the latent's statistics."""
    rows, stats, pics = [], [], []
    for clip in clips_u8:
        x = clip[None].float() / 127.5 - 1
        mean, logvar = model.encoder(x.contiguous(memory_format=torch.channels_last_3d))
        y = model.decoder(mean.contiguous(memory_format=torch.channels_last_3d)).clamp(-1, 1)
        mse = ((y - x) / 2).square().mean().item()
        rows.append(round(-10 * math.log10(max(mse, 1e-10)), 2))
        stats.append([mean.mean().item(), mean.std().item(), (0.5 * logvar).exp().mean().item()])
        pick = [0, x.shape[2] // 2, x.shape[2] - 1]
        tri = torch.stack([x, y, (y - x) * 4])[:, 0, :, pick]  # [3 pictures, 3 colours, frames, H, W]
        pics.append(((tri * 0.5 + 0.5).clamp(0, 1) * 255).round().byte().permute(2, 3, 0, 4, 1).flatten(0, 1).flatten(1, 2))
    if png: write_png(png, torch.cat(pics[:4], dim=1).cpu().numpy())
    return {"psnr": rows, "mean_psnr": round(float(np.mean(rows)), 2),
            "latent_mean": round(float(np.mean([s[0] for s in stats])), 4),
            "latent_std": round(float(np.mean([s[1] for s in stats])), 4),
            "posterior_std": round(float(np.mean([s[2] for s in stats])), 4)}


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", default="demo.safetensors")
    p.add_argument("--seconds", type=float, default=420, help="length of the whole run")
    p.add_argument("--reserve", type=float, default=20, help="of these, kept for the evaluation")
    p.add_argument("--steps", type=int, default=10 ** 9, help="stop after so many steps")
    p.add_argument("--start", help="checkpoint of the same shape to go on from, instead of the linear code")
    p.add_argument("--footage", help="npz with arrays image* [H, W, 3] and clip* [T, H, W, 3], u8, to train on too")
    p.add_argument("--test", help="npz with arrays [T, H, W, 3], u8, that are only evaluated")
    p.add_argument("--channels", default="16,32,64,80")
    p.add_argument("--layers", type=int, default=1)
    p.add_argument("--groups", type=int, default=4)
    p.add_argument("--pool", type=int, default=2400, help="procedural clips to render")
    p.add_argument("--side", type=int, default=256, help="their width and height")
    p.add_argument("--pixels", type=float, default=6e5, help="pixels a step")
    p.add_argument("--lr", type=float, default=7e-4)
    p.add_argument("--ema", type=float, default=0.998, help="decay of the averaged weights, which are what is saved")
    p.add_argument("--kl", type=float, default=3e-4, help="weight of the KL term, per latent number")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--every", type=int, default=200, help="steps between lines of the log")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    a = p.parse_args()

    started, device = time.time(), torch.device(a.device)
    log = lambda s: print(f"[{time.time() - started:6.1f}] {s}", flush=True)
    torch.manual_seed(a.seed)
    torch.backends.cudnn.benchmark = True
    channels = tuple(int(c) for c in a.channels.split(","))
    model = VideoVae(channels, a.layers, a.groups).to(device)
    count = sum(v.numel() for v in model.parameters())
    card = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    log(f"{card}, torch {torch.__version__}, channels {channels}, {count:,} parameters, {2 * count / 1e6:.2f} MB in f16")
    material = Material(a.pool, a.side, a.seed, device, a.footage, started + a.seconds * 0.1)
    log(f"rendered {len(material.pool)} clips, {len(material.films)} films given")

    ema, steps, seconds, curve = train(a, model, material, device, log, started)
    log(f"{steps} steps in {seconds:.0f} s")

    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    final = unit_latent(ema, model, material)
    half = export(a, final, a.out)
    model.load_state_dict({k: v.float() for k, v in half.items()})
    stem = a.out.removesuffix(".safetensors")
    result = {"procedural": evaluate(model, held_out(8 if device.type == "cuda" else 1, device), stem + "-procedural.png")}
    log(f"held-out procedural: {result['procedural']}")
    if a.test:
        with np.load(a.test) as z:
            for k in z.files:
                clip = torch.from_numpy(z[k]).to(device).permute(3, 0, 1, 2)
                result[k] = evaluate(model, [clip], f"{stem}-{k}.png" if len(result) < 4 else None)
                log(f"{k} {tuple(clip.shape)}: {result[k]}")
    with open(stem + ".json", "w") as f:
        json.dump({"card": card, "torch": torch.__version__, "args": vars(a), "parameters": count, "steps": steps,
                   "train_seconds": round(seconds, 1), "total_seconds": round(time.time() - started, 1),
                   "results": result, "curve": curve}, f, indent=1)
    log(f"wrote {a.out}, {os.path.getsize(a.out):,} bytes")


if __name__ == "__main__":
    main()
