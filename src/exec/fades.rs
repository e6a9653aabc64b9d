//! How tiles are faded into each other: the weight of each of their rows and columns.

use std::sync::Arc;

use crate::ir::Fades;
use crate::model::{Direction, Geometry};
use crate::plan::{Grid, ScheduleSpec, Span};

/// The weights of an axis of tiles.
struct AxisFades {
    /// Of each output row (or column) of each span. Inner spans share theirs, as there may be thousands.
    spans: Vec<Arc<[f32]>>,
    /// Their sum over all spans, for each output row of the image.
    sum: Vec<f32>,
}

/// The weights of the tiles of an image.
pub struct TileFades {
    rows: AxisFades,
    columns: AxisFades,
}

impl TileFades {
    /// `None` without tiles.
    pub fn new(spec: &ScheduleSpec) -> Option<TileFades> {
        let (grid, network) = (spec.grid.as_deref()?, &spec.network);
        Some(TileFades::of_grid(grid, &network.geometry, network.direction))
    }

    fn of_grid(grid: &Grid, geometry: &Geometry, direction: Direction) -> TileFades {
        let axis = |spans: &[Span]| {
            let shared = (grid.size.overlap / geometry.space).min(spans[0].len() - 1);
            match direction {
                Direction::Encode => AxisFades::new(spans, 1, shared),
                Direction::Decode => {
                    // Tiles that share no whole latent pixel have nothing to fade into.
                    let fade = if shared == 0 { 0 } else { grid.size.overlap / geometry.patch };
                    AxisFades::new(spans, geometry.scale(), fade)
                }
            }
        };
        TileFades { rows: axis(&grid.rows), columns: axis(&grid.columns) }
    }

    /// Of the tile in this row and column of tiles.
    pub fn of_tile(&self, row: usize, column: usize) -> Fades<'_> {
        Fades { rows: &self.rows.spans[row], columns: &self.columns.spans[column] }
    }

    /// Of all tiles together.
    pub fn sum(&self) -> Fades<'_> {
        Fades { rows: &self.rows.sum, columns: &self.columns.sum }
    }
}

/// Length of a tile, and whether it fades at its start and at its end.
type FadeKind = (u64, bool, bool);

impl AxisFades {
    /// `factor`: rows of output for each row of latent. `fade`: rows of output that a tile fades over.
    fn new(spans: &[Span], factor: u64, fade: u64) -> AxisFades {
        let length = spans[spans.len() - 1].end;
        let mut sum = vec![0.0; (length * factor) as usize];
        let mut known: Vec<(FadeKind, Arc<[f32]>)> = Vec::new();
        let fades = spans.iter().map(|span| {
            let kind: FadeKind = (span.len(), span.start > 0, span.end < length);
            let same = known.iter().find(|(known, _)| *known == kind).map(|(_, weights)| Arc::clone(weights));
            let weights = same.unwrap_or_else(|| {
                let weights = fades((span.len() * factor) as usize, fade as usize, kind.1, kind.2);
                known.push((kind, Arc::from(weights)));
                Arc::clone(&known[known.len() - 1].1)
            });
            for (sum, weight) in sum[(span.start * factor) as usize..].iter_mut().zip(&*weights) {
                *sum += weight;
            }
            weights
        });
        AxisFades { spans: fades.collect(), sum }
    }
}

/// A cosine from 0 to 1 at the inner edges, 1 elsewhere. Where both fades meet, the one at the end wins.
fn fades(length: usize, fade: usize, at_start: bool, at_end: bool) -> Vec<f32> {
    let mut weights = vec![1.0; length];
    let reach = fade.min(length - 1);
    let ramp = |i: usize| {
        let x = if fade > 1 { i as f64 / (fade - 1) as f64 } else { 0.0 };
        (0.5 - 0.5 * (x * std::f64::consts::PI).cos()) as f32
    };
    if at_start {
        (0..reach).for_each(|i| weights[i] = ramp(i));
    }
    if at_end {
        (0..reach).for_each(|i| weights[length - reach + i] = 1.0 - ramp(i));
    }
    weights
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{Spacing, TileSize};

    /// Of square tiles of 64 pixels, with 8 pixels for each of latent.
    fn decoded(overlap: u64, rows: u64, columns: u64) -> TileFades {
        let size = TileSize { height: 64, width: 64, overlap, spacing: Spacing::Strided };
        let geometry = Geometry { pixel_channels: 3, latent_channels: 16, space: 8, time: 4, patch: 1, packing: 1 };
        TileFades::of_grid(&Grid::new(size, rows, columns, 8).unwrap(), &geometry, Direction::Decode)
    }

    #[test]
    fn an_overlap_of_less_than_a_latent_pixel_leaves_no_seam() {
        for overlap in 0..8 {
            let rows = decoded(overlap, 20, 20).rows;
            assert!(rows.sum.iter().all(|weight| *weight == 1.0), "{overlap}: {:?}", rows.sum);
        }
    }

    #[test]
    fn fades_are_complementary_and_only_at_inner_edges() {
        let TileFades { rows, columns } = decoded(16, 12, 8);
        let (upper, lower) = (&rows.spans[0], &rows.spans[1]);
        assert_eq!((upper[0], lower[lower.len() - 1]), (1.0, 1.0));
        assert!(rows.sum.iter().all(|w| (w - 1.0).abs() < 1e-6), "{:?}", rows.sum);
        assert_eq!((upper[63], lower[0]), (0.0, 0.0));
        assert!(columns.spans[0].iter().all(|w| *w == 1.0));
    }
}
