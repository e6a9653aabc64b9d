//! Following a way that was found before: for a job that goes on where another one stopped. Whoever wrote the way down may
//! have been anybody, so it is looked at as closely as what a host asks for.

use std::cmp::Ordering;
use std::sync::Arc;

use super::{Blueprint, MOST_CHUNK_FRAMES, MOST_LANES, Request};
use crate::plan::Costs;
use crate::plan::cut::{Cut, Past, movable, repeatable};
use crate::plan::job::{Layout, Order};
use crate::plan::tiles::{Grid, TileSize};

/// More latent frames per slice than any host can ask for.
const MOST_SLICE_LATENTS: u64 = 1 << 12;
/// Weights for the fades of all tiles of an axis; more than these are no tiles that anybody wants.
const MOST_FADES: u64 = 1 << 24;

/// Everything about a job that a search may decide.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Way {
    pub cut: Cut,
    pub tiles: Option<TileSize>,
}

impl Layout {
    pub fn way(&self) -> Way {
        Way { cut: (*self.cut).clone(), tiles: self.grid.as_ref().map(|grid| grid.size) }
    }
}

impl Request {
    /// A stream done in this way, whatever the limits; `None` if that is no way to do it.
    pub fn follow(&self, way: &Way, costs: &dyn Costs) -> Option<Blueprint> {
        if self.input.frames != 0 || !self.is_cut(&way.cut, costs) {
            return None;
        }
        let grid = match way.tiles {
            None => None,
            Some(size) => Some(self.checked_grid(size)?),
        };
        let layout = Layout {
            network: Arc::clone(&self.network),
            batch: self.input.batch,
            input: self.input_frame(),
            cut: Arc::new(way.cut.clone()),
            grid,
            order: Order::SliceBySlice,
        };
        Some(self.rehearse(layout, costs).packed(costs))
    }

    fn is_cut(&self, cut: &Cut, costs: &dyn Costs) -> bool {
        let (network, rate) = (&*self.network, self.network.latent_rate());
        let slices = cut.slice > 0 && cut.slice.is_multiple_of(rate) && cut.slice / rate <= MOST_SLICE_LATENTS;
        let chunks = cut.chunks.len() == network.stages.len()
            && cut.chunks.iter().all(|chunk| (1..=MOST_CHUNK_FRAMES).contains(chunk));
        let enters = cut.stored.len() == network.stages.len();
        let past = cut.past.len() == network.layers.len() && self.is_past(&cut.past, costs);
        let away = cut.away.len() == network.layers.len() && !cut.away.contains(&true);
        let fetchable = self.fetchable(costs);
        let weights = cut.weights_away.len() == fetchable.len()
            && cut.weights_away.iter().zip(&fetchable).all(|(away, can_be)| *can_be || !away);
        let mut stages = 0..network.stages.len();
        slices && chunks && enters && past && away && weights && stages.all(|stage| self.can_enter(cut, stage, costs))
    }

    /// Whether frames can come into a stage as the cut says: all of them stored, or some of them made anew.
    fn can_enter(&self, cut: &Cut, stage: usize, costs: &dyn Costs) -> bool {
        let [first, second] = self.network.stages[stage].blocks[0].layers().map(|layer| cut.past[layer]);
        match cut.stored[stage].cmp(&cut.chunks[stage]) {
            Ordering::Equal => true,
            Ordering::Less => {
                let past = !matches!(first, Past::Device | Past::Again) && second != Past::Device;
                self.can_make_anew(stage, costs) && past
            }
            Ordering::Greater => false,
        }
    }

    /// Whether every layer finds its past where that may be.
    fn is_past(&self, past: &[Past], costs: &dyn Costs) -> bool {
        let movable = movable(&self.network, costs);
        let can_move = self.can_band(costs);
        past.iter().enumerate().all(|(layer, past)| {
            let stage = movable.iter().find(|(_, movable)| *movable == layer).map(|(stage, _)| *stage);
            match (past, stage) {
                (Past::Device, _) => true,
                (Past::Bands { near }, Some(_)) => can_move && *near <= Past::SHARES,
                (Past::Again, Some(stage)) => can_move && repeatable(&self.network, stage) == Some(layer),
                (Past::Bands { .. } | Past::Again, None) => false,
            }
        })
    }

    /// The tiles of this size, if there are any and not too many.
    fn checked_grid(&self, size: TileSize) -> Option<Arc<Grid>> {
        let scale = self.network.config.spatial_scale();
        let (rows, columns) = self.latent();
        for (length, pixels) in [(rows, size.height), (columns, size.width)] {
            let side = (pixels / scale).clamp(1, length);
            let spans = length.div_ceil(side - (size.overlap / scale).min(side - 1));
            if spans > MOST_LANES || spans * side * scale > MOST_FADES {
                return None;
            }
        }
        self.grid(size).filter(|grid| self.lanes(grid) <= MOST_LANES)
    }
}
