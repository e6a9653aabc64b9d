//! A clip with something of everything: a gradient, shapes that move and turn, fine lines, letters.

use super::font;
use crate::tensor::{FrameKind, Frames};

pub fn make(kind: FrameKind, frames: u64) -> Frames {
    let mut clip = Frames::new(kind, frames);
    for index in 0..frames as usize {
        // The clip takes two seconds, however many frames that is.
        let time = index as f32 / 8.0;
        let (width, height) = (kind.width, kind.height);
        for (i, pixel) in clip.frame_mut(index).chunks_exact_mut(3).enumerate() {
            pixel.copy_from_slice(&colour_at(i % width, i / width, width, height, time));
        }
        letters(clip.frame_mut(index), kind, time);
    }
    clip
}

/// How much of a pixel lies inside an edge `distance` pixels away: edges are soft, as a camera's are.
fn cover(distance: f32) -> f32 {
    (0.5 - distance).clamp(0.0, 1.0)
}

fn mix(below: [f32; 3], above: [f32; 3], part: f32) -> [f32; 3] {
    std::array::from_fn(|c| below[c] * (1.0 - part) + above[c] * part)
}

fn colour_at(column: usize, row: usize, width: usize, height: usize, time: f32) -> [u8; 3] {
    let size = width.min(height) as f32;
    // From -1 to 1 over the shorter side.
    let x = (2.0 * column as f32 - width as f32) / size;
    let y = (2.0 * row as f32 - height as f32) / size;
    let mut colour = [0.35 + 0.25 * x + 0.05 * time.sin(), 0.45 - 0.2 * y, 0.6 + 0.15 * (x + y + time).sin()];

    // Stripes that get finer to the right, behind the lower edge.
    let wave = (30.0 * x * (1.0 + 0.4 * x) + 2.0 * time).sin();
    colour = mix(colour, [0.5 + 0.3 * wave; 3], cover((0.72 - y) * size / 2.0));

    // A disc that goes around.
    let (cx, cy) = (0.45 * (1.6 * time).cos(), 0.3 * (1.6 * time).sin() - 0.1);
    let disc = ((x - cx).hypot(y - cy) - 0.24) * size / 2.0;
    let shade = 0.75 + 0.25 * (3.0 * (x - cx) - 3.0 * (y - cy)).tanh();
    colour = mix(colour, [0.95 * shade, 0.55 * shade, 0.15 * shade], cover(disc));

    // A square that turns on its own centre.
    let (sine, cosine) = (0.9 * time).sin_cos();
    let (dx, dy) = (x + 0.55, y - 0.35);
    let (u, v) = (dx * cosine + dy * sine, dy * cosine - dx * sine);
    let square = (u.abs().max(v.abs()) - 0.2) * size / 2.0;
    colour = mix(colour, [0.15, 0.6 + 0.2 * u, 0.35], cover(square));

    // A ring that grows and shrinks.
    let ring = (((x - 0.6).hypot(y - 0.35) - 0.2 - 0.05 * (2.0 * time).sin()).abs() - 0.03) * size / 2.0;
    colour = mix(colour, [0.9, 0.9, 0.95], cover(ring));
    colour.map(|value| (value.clamp(0.0, 1.0) * 255.0).round() as u8)
}

fn letters(frame: &mut [u8], kind: FrameKind, time: f32) {
    let dot = (kind.width / 96).max(1);
    let left = (kind.width as f32 * (0.08 + 0.02 * time)) as usize;
    let top = kind.height / 14;
    font::dots("VIDEO VAE", |column, row| {
        for y in top + row * dot..(top + (row + 1) * dot).min(kind.height) {
            for x in (left + column * dot).min(kind.width)..(left + (column + 1) * dot).min(kind.width) {
                frame[3 * (y * kind.width + x)..][..3].copy_from_slice(&[245, 240, 225]);
            }
        }
    });
}
