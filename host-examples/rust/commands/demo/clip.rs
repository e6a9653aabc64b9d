//! A clip with something of everything: soft clouds, hills that pass each at its own speed, fine furrows, a striped
//! balloon that rises and turns, letters.

use super::font;
use crate::Result;
use crate::tensor::{FrameKind, Frames};

/// Frames a second.
pub const RATE: u16 = 16;

pub fn make(kind: FrameKind, frames: u64) -> Result<Frames> {
    let mut clip = Frames::new(kind, frames)?;
    for index in 0..frames as usize {
        let view = View { width: kind.width, height: kind.height, time: index as f32 / f32::from(RATE) };
        for (i, pixel) in clip.frame_mut(index).chunks_exact_mut(3).enumerate() {
            let colour = view.colour_at(i % kind.width, i / kind.width);
            pixel.copy_from_slice(&colour.map(|value| (value.clamp(0.0, 1.0) * 255.0).round() as u8));
        }
        letters(clip.frame_mut(index), kind, view.time);
    }
    Ok(clip)
}

type Colour = [f32; 3];

fn mix(below: Colour, above: Colour, part: f32) -> Colour {
    std::array::from_fn(|c| below[c] * (1.0 - part) + above[c] * part)
}

fn smooth(from: f32, to: f32, value: f32) -> f32 {
    let part = ((value - from) / (to - from)).clamp(0.0, 1.0);
    part * part * (3.0 - 2.0 * part)
}

/// A number from 0 to 1 for each point of a lattice, and smoothly between them.
fn noise(x: f32, y: f32) -> f32 {
    let lattice = |x: f32, y: f32| {
        let mut bits = (x as i32 as u32).wrapping_mul(0x9e37_79b1) ^ (y as i32 as u32).wrapping_mul(0x85eb_ca77);
        bits = (bits ^ bits >> 15).wrapping_mul(0x2c1b_3c6d);
        ((bits ^ bits >> 13) & 0xffff) as f32 / 65535.0
    };
    let (left, top) = (x.floor(), y.floor());
    let (right, down) = (smooth(0.0, 1.0, x - left), smooth(0.0, 1.0, y - top));
    let row = |y| lattice(left, y) * (1.0 - right) + lattice(left + 1.0, y) * right;
    row(top) * (1.0 - down) + row(top + 1.0) * down
}

struct View {
    width: usize,
    height: usize,
    time: f32,
}

impl View {
    /// Pixels for each unit: the shorter side goes from -1 to 1.
    fn scale(&self) -> f32 {
        self.width.min(self.height) as f32 / 2.0
    }

    /// How much of a pixel lies inside an edge so far away: edges are soft, as a camera's are.
    fn cover(&self, distance: f32) -> f32 {
        (0.5 - distance * self.scale() / 1.5).clamp(0.0, 1.0)
    }

    fn colour_at(&self, column: usize, row: usize) -> Colour {
        let x = (column as f32 - self.width as f32 / 2.0) / self.scale();
        let y = (row as f32 - self.height as f32 / 2.0) / self.scale();
        self.balloon(self.hills(sky(x, y, self.time), x, y), x, y)
    }

    /// From the far ones to the near one, which has furrows.
    fn hills(&self, mut colour: Colour, x: f32, y: f32) -> Colour {
        const FAR_TO_NEAR: [(f32, f32, f32, Colour); 3] = [
            (0.22, 0.10, 0.06, [0.50, 0.47, 0.62]),
            (0.42, 0.09, 0.14, [0.27, 0.40, 0.42]),
            (0.66, 0.07, 0.30, [0.20, 0.38, 0.20]),
        ];
        for (place, (base, height, speed, body)) in FAR_TO_NEAR.into_iter().enumerate() {
            let along = x + speed * self.time + 3.0 * place as f32;
            let ridge = base - height * ((2.1 * along).sin() + 0.5 * (5.3 * along + 1.0).sin());
            let mut light = 0.85 + 0.3 * noise(9.0 * along, 9.0 * (y - ridge));
            if place == 2 {
                light += 0.12 * (24.0 * along + 9.0 * (y - ridge)).sin() * smooth(0.0, 0.2, y - ridge);
            }
            colour = mix(colour, body.map(|value| value * light), self.cover(ridge - y));
        }
        colour
    }

    fn balloon(&self, colour: Colour, x: f32, y: f32) -> Colour {
        let (dx, dy) = (x + 0.38 - 0.08 * self.time, y + 0.02 + 0.14 * self.time);
        let basket = (dx.abs() - 0.05).max((dy - 0.47).abs() - 0.04);
        let ropes = (dx.abs() - 0.05 - 0.4 * (0.43 - dy)).abs().max((dy - 0.36).abs() - 0.07) - 0.004;
        let colour = mix(colour, [0.35, 0.22, 0.13], self.cover(basket.min(ropes)));

        // Round above, and narrower towards the basket.
        let radius = 0.30 * (1.0 - 0.55 * smooth(0.0, 0.4, dy));
        let across = dx / (radius * radius - (dy * radius / 0.30).powi(2)).max(1e-6).sqrt();
        let stripe = (6.0 * across.clamp(-1.0, 1.0).asin() + 1.2 * self.time).sin();
        let cloth = mix([0.86, 0.16, 0.14], [0.97, 0.93, 0.84], smooth(-0.3, 0.3, stripe));
        let light = 0.92 - 0.3 * smooth(-0.2, 1.0, -across) - 0.12 * smooth(0.0, 0.3, dy);
        mix(colour, cloth.map(|value| value * light), self.cover(dx.hypot(dy * radius / 0.30) - radius))
    }
}

fn sky(x: f32, y: f32, time: f32) -> Colour {
    let blue = mix([0.20, 0.36, 0.66], [0.97, 0.77, 0.60], smooth(-1.0, 0.4, y));
    let (u, v) = (1.6 * x + 0.12 * time, 4.0 * y);
    let cloud = 0.55 * noise(u, v) + 0.3 * noise(2.0 * u + 5.0, 2.0 * v) + 0.15 * noise(4.0 * u, 4.0 * v + 9.0);
    let colour = mix(blue, [1.0, 0.93, 0.90], 0.75 * smooth(0.45, 0.75, cloud) * smooth(0.3, -0.2, y));
    let sun = (x - 0.48).hypot(y + 0.12);
    let colour = mix(colour, [1.0, 0.86, 0.58], 0.6 * (-4.0 * (sun - 0.16).max(0.0)).exp());
    mix(colour, [1.0, 0.96, 0.80], smooth(0.17, 0.15, sun))
}

/// Letters that move by less than a pixel at a time, so their edges are soft as well.
fn letters(frame: &mut [u8], kind: FrameKind, time: f32) {
    let dot = kind.width.min(kind.height) as f32 / 64.0;
    let left = kind.width as f32 * (0.06 + 0.02 * time);
    let top = kind.height as f32 / 14.0;
    // How much of the pixel a stretch of one dot covers.
    let part =
        |pixel: usize, from: f32| ((from + dot).min(pixel as f32 + 1.0) - from.max(pixel as f32)).clamp(0.0, 1.0);
    let mut ink = vec![0.0; kind.width * kind.height];
    font::dots("VIDEO VAE", |column, row| {
        let (x0, y0) = (left + column as f32 * dot, top + row as f32 * dot);
        for y in y0 as usize..((y0 + dot).ceil() as usize).min(kind.height) {
            for x in (x0 as usize).min(kind.width)..((x0 + dot).ceil() as usize).min(kind.width) {
                ink[y * kind.width + x] += part(x, x0) * part(y, y0);
            }
        }
    });
    for (pixel, ink) in frame.chunks_exact_mut(3).zip(ink) {
        for (value, letter) in pixel.iter_mut().zip([250.0, 244.0, 228.0]) {
            *value = (f32::from(*value) + (letter - f32::from(*value)) * ink).round() as u8;
        }
    }
}
