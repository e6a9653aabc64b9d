"""Procedural video: shapes, gradients, textures and letter-like signs under a moving camera.

Random numbers come from numpy, so a seed gives the same scene on every device; only the drawing is done there.
"""
import math

import numpy as np
import torch
import torch.nn.functional as F


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


def render(rng, n, bank, t=17, size=256, shapes=24, bare=0.0, fast=0.0):
    """n clips [n, 3, t, size, size] in 0..1: a textured or graded ground and moving shapes, under a moving camera.
    `bare`: the share of clips without shapes; `fast`: the share with several times the usual motion."""
    device = bank.device
    put = lambda a: torch.from_numpy(np.asarray(a, "f4")).to(device)
    over = lambda a: put(a).view(n, *[1] * 3)  # one number a clip
    speed = rng.exponential(1.3, n) * (rng.random(n) > 0.12)  # pixels a frame; 12 % of the clips stand still
    haste = np.where(rng.random(n) < fast, rng.uniform(2, 8, n), 1.0) if fast else np.ones(n)
    speed, moving = speed * np.sqrt(haste), speed > 0
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
    if bare: count *= rng.random(n) >= bare
    for k in range(shapes):
        shown = k < count
        if not shown.any(): break
        r = size * 0.4 * (0.08 + 0.92 * rng.power(0.6, n)) if k < 4 else np.minimum(5 / rng.random(n) ** 0.9, size * 0.25)
        v = rng.exponential(1.2, n) * moving * (rng.random(n) < 0.7) * haste
        a, spin = rng.uniform(0, 2 * math.pi, n), rng.normal(0, 0.02, n) * moving * haste
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


def bytes_of(video):
    """[n, 3, t, h, w] in 0..1 -> [n, t, h, w, 3], u8."""
    return (video * 255).round().to(torch.uint8).permute(0, 2, 3, 4, 1)


def held_out(n, device):
    """The procedural test clips: seeds that training never uses, textures without photographs."""
    rng = np.random.default_rng(987654321)
    bank = texture_bank(rng, 40, device)
    return bytes_of(torch.cat([render(rng, 4, bank) for _ in range(-(-n // 4))])[:n])
