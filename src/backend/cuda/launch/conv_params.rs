//! Fills in the parameters of a convolution launch, one part after the other.

use std::ops::Range;

use super::frame_stride::FrameStride;
use super::launcher::Launcher;
use super::norm::norm_params;
use super::params::{
    ConvParams, FrameParams, FramePart, HOST, MAIN, MAIN_ODD, Plane, RESIDENT, SHORTCUT, SHORTCUT_ODD, SHORTCUT_TERM,
    SourceParams,
};
use super::sizes::CudaSizes;
use super::tensor_map::{ColumnView, OutputTiles, Swizzle, output_map, patch_map, residual_map};
use super::tiling::{self, MAX_FRAMES, Statistics, TileWidths};
use crate::backend::cuda::driver::DeviceBlock;
use crate::backend::gpu::{
    self, AddressedBlock, ConvBand, ConvLaunch, NextNorm, NormOf, RowSizes, SplitFrames, WeightAddresses,
};
use crate::error::{Error, Result};
use crate::ir::{
    ConvFrame, ConvLayout, DeviceOffset, FrameShape, FrameUnit, Offsets, PartialSumsSize, Sizes, Term, Window,
};

/// The first column of a view that has none: every patch is outside of it.
const NOWHERE: i32 = 1 << 20;

/// Frames of an operation that one launch computes, by their indices.
pub enum LaunchedFrames {
    Single(Vec<usize>),
    /// The first and the second frame of each pair, if they are there.
    Pairs(Vec<[Option<usize>; 2]>),
    /// Frames whose columns are computed in pairs.
    ColumnPairs(Vec<usize>),
}

impl LaunchedFrames {
    /// The launches of an operation.
    pub fn of(sizes: CudaSizes, layout: &ConvLayout, frames: &[ConvFrame<Offsets>]) -> Vec<LaunchedFrames> {
        if sizes.in_column_pairs(layout) {
            let indices: Vec<usize> = (0..frames.len()).collect();
            return indices.chunks(MAX_FRAMES / 2).map(|frames| LaunchedFrames::ColumnPairs(frames.to_vec())).collect();
        }
        let (mut single, mut pairs) = (Vec::new(), Vec::new());
        for unit in FrameUnit::of(layout, frames) {
            match unit {
                FrameUnit::Single(index) => single.push(index),
                FrameUnit::Pair(pair) => pairs.push(pair),
            }
        }
        let mut launches: Vec<LaunchedFrames> = Vec::new();
        if !single.is_empty() {
            launches.push(LaunchedFrames::Single(single));
        }
        launches.extend(pairs.chunks(MAX_FRAMES / 2).map(|pairs| LaunchedFrames::Pairs(pairs.to_vec())));
        launches
    }

    /// Whether a tile has two frames, or two views of one.
    pub fn is_paired(&self) -> bool {
        !matches!(self, LaunchedFrames::Single(_))
    }

    fn views(&self) -> &'static [ColumnView] {
        match self {
            LaunchedFrames::ColumnPairs(_) => &ColumnView::EVEN_AND_ODD,
            _ => &[ColumnView::ALL],
        }
    }

    /// By their place in [`ConvParams::frame`].
    fn places(&self) -> Vec<Option<usize>> {
        match self {
            LaunchedFrames::Single(frames) => frames.iter().copied().map(Some).collect(),
            LaunchedFrames::Pairs(pairs) => pairs.as_flattened().to_vec(),
            LaunchedFrames::ColumnPairs(frames) => frames.iter().flat_map(|frame| [Some(*frame); 2]).collect(),
        }
    }

    /// What the kernel counts: frames, or pairs.
    fn count(&self) -> usize {
        match self {
            LaunchedFrames::Single(frames) | LaunchedFrames::ColumnPairs(frames) => frames.len(),
            LaunchedFrames::Pairs(pairs) => pairs.len(),
        }
    }
}

/// What a launch reads, by its place in [`ConvParams::source`].
#[derive(Clone, Copy)]
enum Input {
    Main,
    Shortcut,
}

impl Input {
    /// Where the parameters have its whole frames, or their even and odd columns.
    fn parts(self) -> [usize; 2] {
        match self {
            Input::Main => [MAIN, MAIN_ODD],
            Input::Shortcut => [SHORTCUT, SHORTCUT_ODD],
        }
    }
}

/// Columns of an input, and where the parameters have them.
struct InputPart {
    input: Input,
    index: usize,
    columns: Range<u64>,
    view: ColumnView,
}

struct InputSlots {
    main: FrameStride,
    /// Resident and host part.
    split: Option<[FrameStride; 2]>,
    shortcut: Option<FrameStride>,
}

struct OutputSlots {
    out: FrameStride,
    residual: FrameStride,
}

pub struct ConvParamsBuilder<'a> {
    pub sizes: CudaSizes,
    pub block: &'a DeviceBlock,
    pub weights: &'a WeightAddresses,
    pub conv: &'a ConvLaunch<'a>,
    pub frames: &'a [ConvFrame<Offsets>],
    pub band: &'a ConvBand<'a, Launcher>,
    /// Which of the frames this launch computes, in the order of [`ConvParams::frame`].
    pub launched: &'a LaunchedFrames,
    pub tile: (i32, i32),
    /// Whether the kernel reads and writes frames by tensor maps.
    pub tensor_maps: bool,
}

impl ConvParamsBuilder<'_> {
    pub fn build(&self) -> Result<ConvParams> {
        self.frames.iter().try_for_each(|frame| self.check_frame(frame))?;
        let mut params = self.tiles();
        let inputs = InputSlots {
            main: self.main_input(&mut params)?,
            split: self.split_inputs(&mut params)?,
            shortcut: self.shortcut_input(&mut params)?,
        };
        let outputs = self.outputs(&mut params)?;
        self.frame_terms(&mut params, &inputs, &outputs);
        self.partial_sums(&mut params, &inputs.main)?;
        self.next_norm(&mut params)?;
        Ok(params)
    }

    fn widths(&self) -> TileWidths {
        TileWidths::of(self.conv.layout)
    }

    fn k_block(&self) -> u64 {
        self.widths().k_block(self.sizes.element())
    }

    /// The extra frame of a launch that leaves partial sums: its only term.
    fn partial_sums_term(&self) -> Result<Option<Term<Offsets>>> {
        let Some(after) = &self.conv.partial_sums.after else { return Ok(None) };
        match &after.pending[..] {
            [terms] if terms.len() == 1 => Ok(Some(terms[0])),
            _ => Err(Error::Internal("a launch leaves the partial sums of one term only".into())),
        }
    }

    fn host_part(&self, frame: DeviceOffset) -> Option<DeviceOffset> {
        self.band.split.and_then(|split| split.host_part(frame))
    }

    fn slots(&self, frames: impl Iterator<Item = DeviceOffset> + Clone, shape: FrameShape) -> Result<FrameStride> {
        let bytes = self.sizes.frame_bytes(shape, self.conv.layout.norm.groups());
        FrameStride::new(frames.map(|frame| self.block.address(frame)), bytes)
    }

    fn is_shortcut(&self, term: &Term<Offsets>) -> bool {
        u64::from(term.slab) == self.conv.layout.slabs
    }

    /// A launch must touch nothing outside its block: afterwards nobody could tell which one did.
    fn check_frame(&self, frame: &ConvFrame<Offsets>) -> Result<()> {
        let (layout, input, output) = (self.conv.layout, self.conv.input, self.conv.output());
        let (rows, input_rows) = (&self.band.rows, count(&self.band.input_rows));
        let bytes = |rows: u64, shape: FrameShape| self.sizes.data_bytes(FrameShape { height: rows, ..shape });
        let holds = |frame: DeviceOffset, from: u64, rows: u64, shape: FrameShape| {
            self.block.at(frame.0.wrapping_add(bytes(from, shape)), bytes(rows, shape)).map(|_| ())
        };
        for term in frame.terms.iter() {
            match layout.shortcut {
                Some(cin) if self.is_shortcut(term) => {
                    holds(term.frame, 0, count(rows), output.with_channels(cin))?;
                }
                _ => match self.band.split.and_then(|split| Some((split.columns, split.host_part(term.frame)?))) {
                    Some((columns, host)) => {
                        let part = |columns: Range<u64>| FrameShape { width: count(&columns), ..input };
                        holds(term.frame, 0, input_rows, part(columns.resident()))?;
                        holds(host, 0, input_rows, part(columns.host()))?;
                    }
                    None => holds(term.frame, 0, input_rows, input)?,
                },
            }
        }
        let by = gpu::output_rows(layout);
        let mut like_output = [Some(frame.out), frame.residual].into_iter().flatten();
        like_output.try_for_each(|frame| holds(frame, rows.start * by, count(rows) * by, output))
    }

    fn tiles(&self) -> ConvParams {
        let (layout, rows) = (self.conv.layout, &self.band.rows);
        let (grid, views) = (gpu::tile_grid(layout, self.conv.input), self.launched.views().len() as u64);
        let width = grid.width.div_ceil(views);
        ConvParams {
            height: grid.height as i32,
            width: width as i32,
            missing_columns: (views * width - grid.width) as i32,
            tiles_x: (width as i32 + self.tile.1 - 1) / self.tile.1,
            tiles_y: (count(rows) as i32 + self.tile.0 - 1) / self.tile.0,
            first_row: rows.start as i32,
            channel_tiles: tiling::channel_tiles(layout) as i32,
            phases: layout.window.phases() as i32,
            frames: (self.launched.count() + usize::from(self.conv.partial_sums.after.is_some())) as i32,
            cout: tiling::output_stride(layout.cout) as i32,
            tile_rows: self.tile.0,
            bias: self.weights.bias,
            ..ConvParams::default()
        }
    }

    /// The main source, and its frames that are not split.
    fn main_input(&self, params: &mut ConvParams) -> Result<FrameStride> {
        let (layout, input, seen) = (self.conv.layout, self.conv.input, &self.band.input_rows);
        let extra = self.partial_sums_term()?;
        if let Some(term) = extra {
            self.block.at(term.frame.0, self.sizes.data_bytes(input))?;
        }
        let terms = self.frames.iter().flat_map(|frame| frame.terms.iter()).chain(&extra);
        let whole = terms.filter(|term| u64::from(term.slab) < layout.slabs && self.host_part(term.frame).is_none());
        let slots = self.slots(whole.map(|term| term.frame), input)?;
        let channels = tiling::input_stride(layout.cin);
        params.source[0] = SourceParams {
            weights: self.weights.slabs,
            height: count(seen) as i32,
            channels: channels as i32,
            k_blocks: channels.div_ceil(self.k_block()) as i32,
            ..self.patches(layout.window)
        };
        params.source[0].plane.iter_mut().for_each(|plane| plane.dy -= seen.start as i32);
        self.put_views(params, Input::Main, &slots, input.width)?;
        Ok(slots)
    }

    /// The two parts of split cached frames, of the same source.
    fn split_inputs(&self, params: &mut ConvParams) -> Result<Option<[FrameStride; 2]>> {
        let Some(SplitFrames { columns, frames }) = self.band.split else { return Ok(None) };
        let (resident, host) = (frames.iter().map(|(resident, _)| *resident), frames.iter().map(|(_, host)| *host));
        let part = |columns: &Range<u64>| FrameShape { width: count(columns), ..self.conv.input };
        let slots = [self.slots(resident, part(&columns.resident()))?, self.slots(host, part(&columns.host()))?];
        for (slots, index, columns) in [(&slots[0], RESIDENT, columns.resident()), (&slots[1], HOST, columns.host())] {
            self.put_part(params, slots, InputPart { input: Input::Main, index, columns, view: ColumnView::ALL })?;
        }
        params.split_column = columns.split() as i32;
        Ok(Some(slots))
    }

    fn shortcut_input(&self, params: &mut ConvParams) -> Result<Option<FrameStride>> {
        let Some(cin) = self.conv.layout.shortcut else { return Ok(None) };
        let (shape, rows) = (self.conv.output().with_channels(cin), &self.band.rows);
        let last_terms = self.frames.iter().filter_map(|frame| frame.terms.last());
        let slots = self.slots(last_terms.map(|term| term.frame), shape)?;
        params.source[1] = SourceParams {
            weights: self.weights.shortcut,
            height: count(rows) as i32,
            channels: tiling::channel_stride(shape.channels) as i32,
            k_blocks: shape.channels.div_ceil(self.k_block()) as i32,
            ..self.patches(Window::Point)
        };
        params.source[1].plane[0].dy -= rows.start as i32;
        self.put_views(params, Input::Shortcut, &slots, shape.width)?;
        Ok(Some(slots))
    }

    /// Where input frames lie, or each view of them.
    fn put_views(&self, params: &mut ConvParams, input: Input, slots: &FrameStride, width: u64) -> Result<()> {
        for (index, view) in input.parts().into_iter().zip(self.launched.views()) {
            self.put_part(params, slots, InputPart { input, index, columns: 0..width, view: *view })?;
        }
        Ok(())
    }

    /// Where input frames lie, or these columns of them.
    fn put_part(&self, params: &mut ConvParams, slots: &FrameStride, part: InputPart) -> Result<()> {
        let InputPart { input, index, columns, view } = part;
        let width = count(&columns);
        params.part[index] = FramePart {
            frames: slots.address(),
            slot_bytes: slots.bytes(),
            width: width as i32,
            first_column: if view.is_empty(width) { NOWHERE } else { columns.start as i32 },
        };
        if self.tensor_maps {
            let (source, swizzle) = (&params.source[input as usize], Swizzle::of(self.patch_row_bytes()));
            let part = &params.part[index];
            params.input_map[index] = patch_map(self.sizes, source, part, slots.count(), swizzle, view)?;
        }
        Ok(())
    }

    /// Outputs, residuals and statistics records.
    fn outputs(&self, params: &mut ConvParams) -> Result<OutputSlots> {
        let (conv, output, sizes) = (self.conv, self.conv.output(), self.sizes);
        let out = self.slots(self.frames.iter().map(|frame| frame.out), output)?;
        let added = self.frames.iter().filter_map(|frame| frame.residual);
        let residual = self.slots(added.clone(), output)?;
        params.out = out.address();
        params.out_slot_bytes = out.bytes();
        if added.count() > 0 {
            params.residual = residual.address();
            params.residual_slot_bytes = residual.bytes();
        }
        if self.tensor_maps {
            let (columns, widths) = (if self.launched.is_paired() { 8 } else { 16 }, self.widths());
            for (index, view) in self.launched.views().iter().enumerate() {
                let tiles = OutputTiles { widths, columns, view: *view };
                params.out_map[index] = output_map(sizes, params, output, out.count(), tiles)?;
                if params.residual != 0 {
                    let count = residual.count();
                    params.residual_map[index] = residual_map(sizes, params, output, count, widths, *view)?;
                }
            }
        }
        if conv.statistics && Statistics::of(conv.layout) == Statistics::Records {
            let bytes = self.frames.len() as u64 * sizes.statistics_records_bytes(conv.layout, conv.input);
            params.records = self.block.at(conv.scratch, bytes)?;
        }
        Ok(OutputSlots { out, residual })
    }

    /// Of a pixel in a patch.
    fn patch_row_bytes(&self) -> u64 {
        if self.launched.is_paired() { tiling::PAIR_ROW_BYTES } else { self.widths().row_bytes }
    }

    fn patches(&self, window: Window) -> SourceParams {
        let tile = if self.launched.is_paired() { tiling::CONV_PAIR_BLOCK } else { self.tile };
        match self.launched {
            LaunchedFrames::ColumnPairs(_) if window == Window::Same => column_patches(tile, self.patch_row_bytes()),
            _ => patches(window, tile, self.patch_row_bytes()),
        }
    }

    /// What each output frame is the sum of.
    fn frame_terms(&self, params: &mut ConvParams, inputs: &InputSlots, outputs: &OutputSlots) {
        let address = |frame: DeviceOffset| self.block.address(frame);
        let views = self.launched.views().len();
        for (place, (params, index)) in params.frame.iter_mut().zip(self.launched.places()).enumerate() {
            *params = FrameParams::default();
            let Some(index) = index else { continue };
            let frame = &self.frames[index];
            params.bias = i32::from(frame.bias);
            params.out = outputs.out.of(address(frame.out));
            params.record = (index * views + place % views) as i32;
            for term in frame.terms.iter() {
                if self.is_shortcut(term) {
                    params.slot[SHORTCUT_TERM] = inputs.shortcut.map_or(-1, |slots| slots.of(address(term.frame)));
                    continue;
                }
                let at = params.terms as usize;
                params.slab[at] = i32::from(term.slab);
                match (inputs.split, self.host_part(term.frame)) {
                    (Some([resident_slots, host_slots]), Some(host)) => {
                        params.slot[at] = resident_slots.of(address(term.frame));
                        params.host_slot[at] = host_slots.of(address(host));
                    }
                    _ => params.slot[at] = inputs.main.of(address(term.frame)),
                }
                params.terms += 1;
            }
            if let Some(added) = frame.residual {
                params.residual = outputs.residual.of(address(added));
            }
        }
    }

    /// Partial sums of another launch, and an extra frame that leaves partial sums only.
    fn partial_sums(&self, params: &mut ConvParams, main: &FrameStride) -> Result<()> {
        let sums = self.conv.partial_sums;
        if let Some(PartialSumsSize { bytes, .. }) = self.sizes.partial_sums(self.conv.layout, self.conv.input, 1) {
            let address = |at: Option<DeviceOffset>| at.map_or(Ok(0), |frame| self.block.at(frame.0, bytes));
            params.partial_in = address(sums.before)?;
            params.partial_out = address(sums.after.as_ref().map(|after| after.into))?;
        }
        if let Some(term) = self.partial_sums_term()? {
            params.frame[self.frames.len()] = FrameParams {
                slot: [main.of(self.block.address(term.frame)), 0, 0, -1],
                slab: [i32::from(term.slab), 0, 0, 0],
                terms: 1,
                ..FrameParams::default()
            };
        }
        Ok(())
    }

    fn next_norm(&self, params: &mut ConvParams) -> Result<()> {
        let Some(NextNorm { of: NormOf { weights, layout, .. }, statistics }) = &self.band.next_norm else {
            return Ok(());
        };
        let at = |frame: &DeviceOffset| self.block.at(frame.0, self.sizes.statistics_bytes(layout.norm.groups()));
        let addresses = statistics.iter().map(at).collect::<Result<Vec<u64>>>()?;
        let slots = FrameStride::new(addresses.iter().copied(), 8)?;
        params.norm = norm_params(weights, layout, slots.address(), slots.bytes() / 8);
        for (slot, address) in params.statistics.iter_mut().zip(addresses) {
            *slot = slots.of(address);
        }
        Ok(())
    }
}

/// The patches of a tile, and which taps read them.
fn patches(window: Window, tile: (i32, i32), row_bytes: u64) -> SourceParams {
    let halo = match window {
        Window::Same => 2,
        Window::Point => 0,
        Window::Down | Window::Up => 1,
    };
    let (rows, pitch) = (tile.0 + halo, tile.1 + halo);
    let plane = |i: usize| {
        let (r, s) = (i as i32 / 2, i as i32 % 2);
        match window {
            Window::Same => Plane { dx: -1, dy: -1, rows: 3, cols: 3 },
            Window::Point => Plane { dx: 0, dy: 0, rows: 1, cols: 1 },
            Window::Up => Plane { dx: s - 1, dy: r - 1, rows: 2, cols: 2 },
            Window::Down => Plane { dx: s, dy: r, rows: 2 - r, cols: 2 - s },
        }
    };
    SourceParams {
        rows,
        pitch,
        patch_bytes: rows * pitch * row_bytes as i32,
        stride: if window == Window::Down { 2 } else { 1 },
        planes: if window == Window::Down { 4 } else { 1 },
        taps: (window.side() * window.side()) as i32,
        plane: std::array::from_fn(plane),
        ..SourceParams::default()
    }
}

/// The same of pairs of columns: those of a view of the frame, with three taps below each other.
fn column_patches(tile: (i32, i32), row_bytes: u64) -> SourceParams {
    let taps = tiling::COLUMN_PAIR_ROWS as i32;
    let plane = Plane { dx: 0, dy: -1, rows: taps, cols: 1 };
    let (rows, pitch) = (tile.0 + taps - 1, tile.1);
    let patch_bytes = rows * pitch * row_bytes as i32;
    SourceParams { rows, pitch, patch_bytes, stride: 1, planes: 1, taps, plane: [plane; 4], ..SourceParams::default() }
}

fn count(range: &Range<u64>) -> u64 {
    range.end - range.start
}
