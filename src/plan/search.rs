//! Finds the fastest way to do a job within a limit, in the order of what it costs: shorter chunks and slices first,
//! which cost a little time and no exactness, and tiles last.

mod follow;
mod ways;

pub use follow::Way;

use std::cell::RefCell;
use std::sync::Arc;

use self::ways::{Search, Sizes};
use super::Costs;
use super::blueprint::Blueprint;
use super::cut::{Cut, Past, is_passing, movable, repeatable};
use super::estimate::{Clock, Detour};
use super::job::{Layout, Order};
use super::tiles::{Grid, Spacing, TileSize};
use super::weights::fetchable;
use crate::model::{Direction, LayerId, Network};
use crate::tensor::{BandFrames, FrameShape, Shape};

const MOST_CHUNK_FRAMES: u64 = 8;
/// Tiles of all clips together that a job may have; each is kept track of on its own.
const MOST_LANES: u64 = 1 << 14;
/// The search for tiles that fit ends here: a job of more tiles than this would take for ever.
const MOST_SMALL_TILES: u64 = 1 << 9;
/// Latent frames per slice. Latents are a small part of the work, so a fraction of a busy device's pixels will do; and a
/// slice more keeps frames waiting at every level.
const MOST_SLICE_FRAMES: u64 = 4;
const SLICE_SHARE: u64 = 8;

/// What is to be planned.
#[derive(Debug, Clone)]
pub struct Request {
    pub network: Arc<Network>,
    /// The shape that the host passes in. `frames == 0` stands for a stream.
    pub input: Shape,
    /// Bytes that weights and workspace may take together.
    pub limit: u64,
    /// Bytes of host memory beside the device's that may be taken.
    pub host_limit: u64,
    /// Bytes that loading the weights takes for a moment, weights included; 0 where that is no more than these.
    pub load_bytes: u64,
    /// Whether a job that does not fit whole may be tiled.
    pub allow_tiles: bool,
    /// Tiles that the host asks for.
    pub tiles: Option<TileSize>,
    /// The overlap of tiles that the limit asks for.
    pub overlap: u64,
    /// Latent frames per slice, and the most frames per chunk, where the host sets them.
    pub slice: Option<u64>,
    pub chunk: Option<u64>,
}

/// No way to do the job fits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unplannable {
    /// The least device memory that any way takes, and any way without tiles.
    pub smallest: u64,
    pub smallest_exact: u64,
}

impl Request {
    /// The fastest way that fits. Ways that differ in nothing but time are weighed by estimate, but what fits with everything
    /// on the device is never worse; tiles come last, whatever they would save.
    pub fn plan(&self, costs: &dyn Costs) -> Result<Blueprint, Unplannable> {
        let (sizes, cuts) = (RefCell::new(Sizes::default()), self.cuts(costs.busy_pixels()));
        let weights_away = vec![false; self.network.layers.len()].into();
        let grid = self.asked_tiles();
        let search = Search { request: self, limit: self.limit, grid, weights_away, costs, sizes: &sizes };
        let found = search.first_packed(&cuts[..1]);
        let found = found.or_else(|| search.quickest_of_all(&cuts)).or_else(|| search.anywhere(Search::least_away));
        let tiled = || if self.allow_tiles { self.largest_tiles(&cuts, &search) } else { None };
        let found = found.or_else(tiled);
        found.map_or_else(|| self.smallest(sizes.into_inner(), costs), Ok)
    }

    /// The largest tiles that fit, in the fastest way.
    fn largest_tiles(&self, cuts: &[Arc<Cut>], whole: &Search) -> Option<Blueprint> {
        let (last, can_band) = (cuts.last().expect("there is always one"), self.can_band(whole.costs));
        let mut least = vec![Arc::clone(last)];
        if can_band {
            least.push(Arc::new(self.all_moved(last, whole.costs)));
        }
        self.smaller_tiles().into_iter().find_map(|size| {
            let search = Search { grid: self.grid(size), ..whole.clone() };
            let fits = search.anywhere(|search| search.first_packed(&least))?;
            Some(if can_band { search.quickest_of_all(cuts).unwrap_or(fits) } else { fits })
        })
    }

    fn asked_tiles(&self) -> Option<Arc<Grid>> {
        self.tiles.and_then(|size| self.grid(size))
    }

    /// The smallest way that was met, if that is what fits.
    fn smallest(&self, sizes: Sizes, costs: &dyn Costs) -> Result<Blueprint, Unplannable> {
        let [exact, any] = [sizes.smallest_exact, sizes.smallest].map(|found| found.map(|found| found.packed(costs)));
        let bytes = |found: &Option<Blueprint>| found.as_ref().map_or(u64::MAX, Blueprint::device_bytes);
        let (smallest_exact, smallest) = (bytes(&exact), bytes(&any).min(bytes(&exact)));
        let fits = |found: &Blueprint| found.fits(self.limit, self.host_limit);
        let fitting = [exact, any].into_iter().flatten().find(fits);
        fitting.ok_or(Unplannable { smallest, smallest_exact })
    }

    /// Whether layers can work in bands, with frames that lie elsewhere.
    fn can_band(&self, costs: &dyn Costs) -> bool {
        let frames = BandFrames { inputs: 1, outputs: 1, ..BandFrames::default() };
        costs.band_bytes(&self.network.layers[0].layout, self.input_frame(), frames).is_some()
    }

    /// Of each layer, whether its weights can wait in host memory.
    fn fetchable(&self, costs: &dyn Costs) -> Vec<bool> {
        match self.can_band(costs) {
            true => fetchable(&self.network, self.input_frame(), costs),
            false => vec![false; self.network.layers.len()],
        }
    }

    fn is_still(&self) -> bool {
        self.input.frames == 1
    }

    /// A cut with the past of some layers off the device: first of those where it costs the least time for the memory. It is
    /// made again where that takes less time than to move it.
    fn without_past(&self, cut: &Cut, costs: &dyn Costs, layers: usize) -> Cut {
        let repeatable: Vec<LayerId> =
            (0..self.network.stages.len()).filter_map(|stage| repeatable(&self.network, stage)).collect();
        // Those that read what is made anew.
        let has_made_anew = self.first_blocks(|stage| cut.stored[stage] < cut.chunks[stage]);
        let mut order: Vec<(f64, LayerId, Past)> = self
            .detours(cut, costs)
            .into_iter()
            .filter(|(layer, ..)| !has_made_anew.contains(layer))
            .map(|(layer, detour, bytes)| match repeatable.contains(&layer) && detour.again < detour.host {
                true => (detour.again / bytes, layer, Past::Again),
                false => (detour.host / bytes, layer, Past::HOST),
            })
            .collect();
        order.sort_by(|a, b| a.0.total_cmp(&b.0));
        let mut cut = cut.clone();
        for (_, layer, past) in order.into_iter().take(layers) {
            cut.past[layer] = past;
        }
        // They work in bands, however much of the past there is room for.
        has_made_anew.into_iter().for_each(|layer| cut.past[layer] = Past::HOST);
        cut
    }

    /// A cut with the past of all layers in host memory, which takes the least.
    fn all_moved(&self, cut: &Cut, costs: &dyn Costs) -> Cut {
        let mut cut = cut.clone();
        movable(&self.network, costs).into_iter().for_each(|(_, layer)| cut.past[layer] = Past::HOST);
        cut
    }

    /// The layers of the first blocks of such stages.
    fn first_blocks(&self, of: impl Fn(usize) -> bool) -> Vec<LayerId> {
        let stages = self.network.stages.iter().enumerate().filter(|(stage, _)| of(*stage));
        stages.flat_map(|(_, stage)| stage.blocks[0].layers()).collect()
    }

    /// The stage where a decoder's frames are widest, if what its head makes need not be stored.
    fn makes_anew(&self, costs: &dyn Costs) -> Option<usize> {
        Some(self.network.stages.len() - 1).filter(|stage| self.can_make_anew(*stage, costs))
    }

    /// Whether what the head of a stage makes need not be stored, as the layers that read it can have it made anew.
    fn can_make_anew(&self, stage: usize, costs: &dyn Costs) -> bool {
        let network = &*self.network;
        let head = network.stages[stage].head;
        let frames = BandFrames { outputs: 1, outs: 1, ..BandFrames::default() };
        let shape = network.input_shapes(self.input_frame())[head];
        is_passing(network, stage) && costs.band_bytes(&network.layers[head].layout, shape, frames).is_some()
    }

    /// What each layer would lose that did without its past on the device, in a time that is the same for all of them, and the
    /// bytes of a frame of it.
    fn detours(&self, cut: &Cut, costs: &dyn Costs) -> Vec<(LayerId, Detour, f64)> {
        let network = &*self.network;
        let clock = Clock { network, costs, rates: costs.rates() };
        let shapes = network.input_shapes(self.input_frame());
        let frames = network.later_stage_frames(network.config.time_scale());
        let detour = |(stage, layer): (usize, LayerId)| {
            let head = network.stages[stage].head;
            let detour = clock.detour(layer, shapes[layer], cut.chunks[stage], (head, shapes[head]));
            let chunks = frames[stage] as f64 / cut.chunks[stage] as f64;
            (layer, detour.times(chunks), costs.frame_bytes(shapes[layer]) as f64)
        };
        movable(network, costs).into_iter().map(detour).collect()
    }

    /// The input as the network sees it: whole latent pixels.
    fn input_frame(&self) -> FrameShape {
        let scale = match self.network.direction {
            Direction::Encode => self.network.config.spatial_scale(),
            Direction::Decode => 1,
        };
        let whole = |length: u64| length.div_ceil(scale) * scale;
        FrameShape::new(whole(self.input.height), whole(self.input.width), self.network.input_channels())
    }

    /// Rows and columns of the latent.
    fn latent(&self) -> (u64, u64) {
        let (input, output) = (self.input_frame(), self.network.output_shape(self.input_frame()));
        match self.network.direction {
            Direction::Encode => (output.height, output.width),
            Direction::Decode => (input.height, input.width),
        }
    }

    fn grid(&self, size: TileSize) -> Option<Arc<Grid>> {
        let (rows, columns) = self.latent();
        Grid::new(size, rows, columns, self.network.config.spatial_scale(), self.network.direction).map(Arc::new)
    }

    /// Tiles of all clips together.
    fn lanes(&self, grid: &Grid) -> u64 {
        (grid.tiles() as u64).saturating_mul(self.input.batch)
    }

    /// Whether the tiles asked for are more than can be kept track of.
    pub fn has_too_many_tiles(&self) -> bool {
        self.asked_tiles().is_some_and(|grid| self.lanes(&grid) > MOST_LANES)
    }

    /// Cuts from the fastest to the smallest.
    fn cuts(&self, busy_pixels: u64) -> Vec<Arc<Cut>> {
        let network = &self.network;
        let shapes = network.input_shapes(self.input_frame());
        let wish: Vec<u64> = network
            .stages
            .iter()
            .map(|stage| {
                let head = &network.layers[stage.head];
                let pixels = head.layout.window.output(shapes[stage.head], 1).pixels();
                busy_pixels.div_ceil(pixels.max(1)).min(MOST_CHUNK_FRAMES)
            })
            .collect();
        let (rows, columns) = self.latent();
        let slice = (busy_pixels / SLICE_SHARE / (rows * columns).max(1)).clamp(1, MOST_SLICE_FRAMES);
        let rate = self.network.latent_rate();
        let mut cuts: Vec<Arc<Cut>> = Vec::new();
        for cap in [MOST_CHUNK_FRAMES, 4, 2, 1] {
            let slice = self.slice.unwrap_or(slice.min(cap));
            let most = self.chunk.unwrap_or(cap).min(cap);
            let chunks = wish.iter().map(|w| (*w).min(most)).collect();
            let cut = Arc::new(Cut::new(network, slice * rate, chunks));
            if !cuts.contains(&cut) {
                cuts.push(cut);
            }
        }
        cuts
    }

    /// Cuts for layers that go through their frames in bands, which cost little memory and gain by many frames at a time:
    /// their past is moved once for all of them.
    fn wider_cuts(&self) -> Vec<Cut> {
        let network = &*self.network;
        if self.is_still() {
            return vec![Cut::new(network, network.latent_rate(), vec![1; network.stages.len()])];
        }
        let shapes = network.input_shapes(self.input_frame());
        let pixels: Vec<u64> = network
            .stages
            .iter()
            .map(|stage| network.layers[stage.head].layout.window.output(shapes[stage.head], 1).pixels())
            .collect();
        let largest = pixels.iter().copied().max().unwrap_or(1);
        let rates = network.later_stage_frames(network.config.time_scale());
        let mut cuts: Vec<Cut> = Vec::new();
        for slice in [1, 2, 3, 4] {
            let slice = self.slice.unwrap_or(slice) * self.network.latent_rate();
            for (most, halves) in [8, 6, 4, 3, 2, 1].into_iter().flat_map(|most| [1, 2, 4, 8].map(|h| (most, h))) {
                // Frames at full resolution, that many halves of it at half the resolution, and twice the frames with each
                // halving further, which is a quarter of the pixels.
                let chunk = |pixels: &u64| match (largest / pixels.max(&1)).ilog2() / 2 {
                    0 => most,
                    halvings => (most * halves / 2) << (halvings - 1),
                };
                let allowed = self.chunk.unwrap_or(MOST_CHUNK_FRAMES).min(MOST_CHUNK_FRAMES);
                // No more than a slice brings.
                let chunks = pixels.iter().zip(network.later_stage_frames(slice));
                let chunks: Vec<u64> =
                    chunks.map(|(pixels, frames)| chunk(pixels).clamp(1, allowed.min(frames))).collect();
                // Or no more at a quarter of the resolution than those at half of it go with, so that none have to wait.
                let mut matched = chunks.clone();
                if let [Some(half), Some(quarter)] =
                    [4, 16].map(|share| pixels.iter().position(|p| p * share == largest))
                {
                    matched[quarter] = chunks[quarter].min((chunks[half] * rates[quarter]).div_ceil(rates[half]));
                }
                for cut in [chunks, matched].map(|chunks| Cut::new(network, slice, chunks)) {
                    if !cuts.contains(&cut) {
                        cuts.push(cut);
                    }
                }
            }
        }
        cuts
    }

    /// The orders a cut and a grid can be run in.
    fn layouts(&self, cut: &Arc<Cut>, grid: Option<Arc<Grid>>) -> Vec<Layout> {
        let orders: &[Order] = match (self.input.frames, &grid) {
            (0, _) => &[Order::SliceBySlice],
            (_, None) => &[Order::LaneByLane],
            (_, Some(_)) => &[Order::LaneByLane, Order::SliceBySlice],
        };
        let layout = |order: &Order| Layout {
            network: Arc::clone(&self.network),
            batch: self.input.batch,
            input: self.input_frame(),
            cut: Arc::clone(cut),
            grid: grid.clone(),
            order: *order,
        };
        orders.iter().map(layout).collect()
    }

    /// Evenly sized tiles, from the largest down to the least a tile can be, none larger than the host asked for.
    fn smaller_tiles(&self) -> Vec<TileSize> {
        let scale = self.network.config.spatial_scale();
        let (rows, columns) = self.latent();
        let least = 64u64.div_ceil(scale).max(1);
        let overlap = self.overlap / scale;
        // Cutting an axis into n spans that share `overlap` takes spans of this length.
        let side = |length: u64, n: u64| (length + (n - 1) * overlap).div_ceil(n).max(least).min(length);
        let mut sizes: Vec<TileSize> = Vec::new();
        let (mut down, mut across) = (1, 1);
        loop {
            let (height, width) = (side(rows, down), side(columns, across));
            let (height, width) = (height * scale, width * scale);
            let size = TileSize { height, width, overlap: self.overlap, spacing: Spacing::Even };
            let asked = self.tiles.is_none_or(|b| size.height <= b.height && size.width <= b.width);
            // Tiles that are hardly smaller would hardly take less.
            let smaller = sizes.last().is_none_or(|last| size.height * size.width * 10 <= last.height * last.width * 9);
            if asked && smaller && (down, across) != (1, 1) {
                sizes.push(size);
            }
            if down * across > MOST_SMALL_TILES || down * across * self.input.batch > MOST_LANES {
                return sizes;
            }
            // The longer side is cut next, until neither can be. Rounding may make the next cut no finer; a later one is.
            let finer = |length: u64, n: u64| {
                let now = side(length, n);
                (n + 1..=length).take_while(|_| now > least.max(overlap + 1)).find(|m| side(length, *m) < now)
            };
            match (finer(rows, down), finer(columns, across)) {
                (None, None) => return sizes,
                (Some(n), None) => down = n,
                (None, Some(n)) => across = n,
                (Some(n), Some(_)) if height > width => down = n,
                (Some(_), Some(n)) => across = n,
            }
        }
    }
}
