//! Launches convolutions.

use std::ops::Range;

use cudarc::driver::sys;

use crate::backend::cuda::driver::device::check;
use crate::backend::cuda::driver::memory::Block;
use crate::backend::cuda::driver::stream::Stream;
use crate::backend::cuda::launch::kernels::{ConvKernels, Kernel};
use crate::backend::cuda::launch::params::{
    ConvParams, FAR, FinalizeParams, FrameParams, MAIN, MAX_FRAMES, NEAR, Place, SHORTCUT, Source, StatisticsParams,
    TensorMap,
};
use crate::backend::cuda::launch::tiling::{self as geometry, COLUMNS, Kind};
use crate::backend::cuda::offload::weights::Conv;
use crate::backend::cuda::{Cuda, EPS};
use crate::backend::{ConvFrame, ConvLayout, ConvOp, Frame, Precision, Prologue, Term, Window};
use crate::error::{Error, Result};
use crate::tensor::{Columns, FrameShape};

/// Dynamic shared memory of the kernels. The first leaves room for a block beside it that needs none: each has 1 KiB of the driver's.
pub const HOPPER_SHARED: u32 = 230_528;
pub const AMPERE_SHARED: u32 = 2 * 23_040 + 3 * 16_384;
pub const fn in_shared(precision: Precision) -> u32 {
    let (element, run) = (precision.bytes() as u32, most_in_run(precision));
    let (weights, pitch) = (128 * (112 + 16 / element) * element, run * 16 + if element == 2 { 10 } else { 2 });
    weights + 3 * 10 * pitch * 4 * element + 128 * (8 + 4) + run * 4 * 3 * 32 * 4
}
/// Tiles side by side that a block of the pixel kernel goes through at most: shared memory has room for no more.
const fn most_in_run(precision: Precision) -> u32 {
    16 / precision.bytes() as u32
}
/// The most blocks of it that a multiprocessor works on at the same time.
const IN_BLOCKS: u32 = 2;

/// Frames by their distance from the first of them, in steps that all of them are a whole number of apart: what the kernels
/// call slots.
#[derive(Clone, Copy)]
pub struct Slots {
    base: u64,
    step: u64,
}

impl Slots {
    /// `bytes`: of one frame, which is the step where there is but one.
    pub fn new(addresses: impl Iterator<Item = u64> + Clone, bytes: u64) -> Result<Slots> {
        let (base, last) = (addresses.clone().min().unwrap_or(0), addresses.clone().max().unwrap_or(0));
        let step = addresses.fold(0, |step, address| common_divisor(step, address - base));
        let step = if step == 0 { bytes } else { step };
        match i32::try_from((last - base) / step) {
            Ok(_) => Ok(Slots { base, step }),
            Err(_) => Err(Error::Internal(format!("frames {} bytes apart in steps of {step}", last - base))),
        }
    }

    pub fn of(&self, address: u64) -> i32 {
        ((address - self.base) / self.step) as i32
    }

    /// Of the first frame.
    pub fn address(&self) -> u64 {
        self.base
    }

    pub fn bytes(&self) -> i64 {
        self.step as i64
    }

    /// Up to the last of these frames.
    fn count(&self, addresses: &[u64]) -> u64 {
        addresses.iter().map(|address| self.of(*address)).max().unwrap_or(0) as u64 + 1
    }
}

fn common_divisor(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { common_divisor(b, a % b) }
}

/// A band of a convolution: rows of the grid, and those of the input that they see. Frames that are read begin at the first of
/// these rows, those of a shortcut at the first of the band. Frames that are written begin at their top, of which no more need
/// be there than the rows of the band: kernels count rows from there, and touch no others.
pub struct Band<'a> {
    pub rows: Range<u64>,
    pub seen: Range<u64>,
    pub parted: Option<Parted<'a>>,
    pub stream: &'a Stream,
    pub norm: Option<NextNorm<'a>>,
}

/// The norm of the layer that reads what a convolution makes, applied by the convolution: its kernel is that of [`Kind::In`], and
/// the statistics of its frames are known.
pub struct NextNorm<'a> {
    pub weights: &'a Conv,
    pub layout: &'a ConvLayout,
    pub statistics: &'a [Frame],
}

/// Frames whose columns lie in two places, both from the first row that a band sees. Terms know them by the first place.
#[derive(Clone, Copy)]
pub struct Parted<'a> {
    pub columns: Columns,
    pub frames: &'a [(Frame, Frame)],
}

impl Parted<'_> {
    /// The second place of a frame that is parted.
    fn far(&self, near: Frame) -> Option<Frame> {
        self.frames.iter().find(|(frame, _)| *frame == near).map(|(_, far)| *far)
    }
}

/// A kernel with the tile it works on.
struct Choice {
    kernel: Kernel,
    tile: (i32, i32),
    threads: u32,
    /// Whether its input comes by the tensor copy engine, and its blocks stay until all tiles are done.
    hopper: bool,
}

impl Cuda {
    /// `next`: what is to be done for the next layer.
    fn choose(&self, layout: &ConvLayout, grid: FrameShape, rows: &Range<u64>, next: Prologue) -> Result<Choice> {
        let kernels = &self.kernels;
        // Whether or not this launch has any sums: the order of additions must not depend on that.
        let of = |both: ConvKernels| if geometry::keeps_sums(layout) { both.sums } else { both.plain };
        Ok(match (Kind::of(layout)?, kernels.conv_hopper) {
            (Kind::In, _) => {
                let kernel = match next {
                    Prologue::None => kernels.conv_in,
                    Prologue::Norm => kernels.conv_in_norm,
                    Prologue::NormSilu => kernels.conv_in_silu,
                };
                Choice { kernel, tile: (8, 16), threads: 256, hopper: false }
            }
            _ if next != Prologue::None => {
                return Err(Error::Internal("a convolution of many channels is to normalise what it makes".into()));
            }
            (Kind::Out, _) => return Err(Error::Internal("a convolution to pixels carries on sums".into())),
            // Its store takes a chunk of a phase's channels at a time.
            (Kind::Main, Some(both))
                if layout.window != Window::Up || layout.cout.is_multiple_of(self.precision.chunk()) =>
            {
                Choice { kernel: of(both), tile: hopper_tile(grid, rows), threads: 384, hopper: true }
            }
            (Kind::Main, _) => {
                let threads = 64 * self.precision.bytes() as u32;
                Choice { kernel: of(kernels.conv_ampere), tile: (8, 16), threads, hopper: false }
            }
        })
    }

    /// Partial statistics of each frame.
    pub(in crate::backend::cuda) fn conv_scratch_bytes(
        &self,
        layout: &ConvLayout,
        input: FrameShape,
        frames: u64,
    ) -> u64 {
        frames.min(MAX_FRAMES as u64) * geometry::partial_bytes(layout, input)
    }

    pub(in crate::backend::cuda) fn launch_conv(
        &self,
        block: &Block,
        weights: &Conv,
        op: &ConvOp,
        frames: &[ConvFrame],
    ) -> Result<()> {
        let output = op.layout.window.output(op.input, op.layout.cout);
        let bytes = self.precision.data_bytes(output);
        let params = self.launch_sums(block, weights, op, frames, None)?;
        let statistics: Vec<u64> = frames.iter().map(|frame| block.address(frame.out) + bytes).collect();
        self.launch_statistics((op.layout, op.input, op.statistics), &params, &statistics)
    }

    /// The convolution, or a band of it, without what has to wait for all of it.
    pub(in crate::backend::cuda) fn launch_sums(
        &self,
        block: &Block,
        weights: &Conv,
        op: &ConvOp,
        frames: &[ConvFrame],
        band: Option<Band>,
    ) -> Result<ConvParams> {
        let (layout, input) = (op.layout, op.input);
        let output = layout.window.output(input, layout.cout);
        let grid = geometry::grid(layout, input);
        let whole =
            Band { rows: 0..grid.height, seen: 0..input.height, parted: None, stream: &self.stream, norm: None };
        let Band { rows, seen, parted, stream, norm } = band.unwrap_or(whole);
        let far = |frame: Frame| parted.and_then(|parted| parted.far(frame));
        let next = norm.as_ref().map_or(Prologue::None, |norm| norm.layout.prologue);
        let choice = self.choose(layout, grid, &rows, next)?;
        for frame in frames {
            let seen = (input, seen.end - seen.start, parted);
            self.check_frame((block, layout), seen, (output, rows.clone()), frame)?;
        }
        let slots = |addresses: &[u64], shape| {
            Slots::new(addresses.iter().copied(), self.precision.frame_bytes(shape, layout.groups))
        };
        // A frame more, of which nothing is made but what a later one begins with.
        let onward = op.sums.after.map(|onward| Term { frame: onward.input, slab: onward.slab });
        if let Some(term) = onward {
            block.at(term.frame.0, self.precision.data_bytes(input))?;
        }
        let terms = frames.iter().flat_map(|frame| frame.terms.iter()).chain(&onward);
        let own = terms.filter(|term| u64::from(term.slab) < layout.slabs && far(term.frame).is_none());
        let inputs = distinct(own.map(|term| block.address(term.frame)));
        let main = slots(&inputs, input)?;

        let mut params = ConvParams {
            height: grid.height as i32,
            width: grid.width as i32,
            tiles_x: (grid.width as i32 + choice.tile.1 - 1) / choice.tile.1,
            tiles_y: ((rows.end - rows.start) as i32 + choice.tile.0 - 1) / choice.tile.0,
            first_row: rows.start as i32,
            column_tiles: geometry::column_tiles(layout) as i32,
            phases: layout.window.phases() as i32,
            frames: (frames.len() + usize::from(onward.is_some())) as i32,
            cout: geometry::output_stride(layout.cout) as i32,
            tile_rows: choice.tile.0,
            ahead: if matches!(layout.window, Window::Same | Window::Up) && layout.shortcut.is_none() { 2 } else { 1 },
            bias: weights.bias()?,
            ..ConvParams::default()
        };
        let channels = if layout.cin <= 3 { 4 } else { geometry::stride(layout.cin) };
        params.source[0] = Source {
            weights: weights.slabs()?,
            height: (seen.end - seen.start) as i32,
            channels: channels as i32,
            chunks: channels.div_ceil(self.precision.chunk()) as i32,
            ..Source::default()
        };
        geometry::cut(&mut params.source[0], layout.window, choice.tile);
        params.source[0].plane.iter_mut().for_each(|plane| plane.dy -= seen.start as i32);
        self.put_place(&mut params, MAIN, (main, &inputs), 0..input.width, choice.hopper)?;
        let mut parts: Option<[Slots; 2]> = None;
        if let Some(Parted { columns, frames }) = parted {
            let (near, far): (Vec<u64>, Vec<u64>) =
                frames.iter().map(|(near, far)| (block.address(*near), block.address(*far))).unzip();
            let mut part = |at: usize, addresses: &[u64], columns: Range<u64>| -> Result<Slots> {
                let part = slots(addresses, FrameShape { width: columns.end - columns.start, ..input })?;
                self.put_place(&mut params, at, (part, addresses), columns, choice.hopper)?;
                Ok(part)
            };
            parts = Some([part(NEAR, &near, columns.near())?, part(FAR, &far, columns.far())?]);
            params.parting = columns.parting() as i32;
        }

        let sides: Vec<u64> = frames.iter().filter_map(|f| f.terms.last()).map(|t| block.address(t.frame)).collect();
        let side = match layout.shortcut.map(|cin| output.with_channels(cin)) {
            Some(shape) => Some((slots(&sides, shape)?, shape)),
            None => None,
        };
        if let Some((side, shape)) = side {
            params.source[1] = Source {
                weights: weights.shortcut()?,
                height: (rows.end - rows.start) as i32,
                channels: geometry::stride(shape.channels) as i32,
                chunks: shape.channels.div_ceil(self.precision.chunk()) as i32,
                ..Source::default()
            };
            geometry::cut(&mut params.source[1], Window::Point, choice.tile);
            params.source[1].plane[0].dy -= rows.start as i32;
            self.put_place(&mut params, SHORTCUT, (side, &sides), 0..shape.width, choice.hopper)?;
        }

        let outs: Vec<u64> = frames.iter().map(|frame| block.address(frame.out)).collect();
        let added: Vec<u64> = frames.iter().filter_map(|f| f.residual).map(|frame| block.address(frame)).collect();
        let (out, residual) = (slots(&outs, output)?, slots(&added, output)?);
        params.out = out.address();
        params.out_slot_bytes = out.bytes();
        if !added.is_empty() {
            params.residual = residual.address();
            params.residual_slot_bytes = residual.bytes();
        }
        if choice.hopper {
            params.out_map = output_map(self.precision, &params, output, out.count(&outs))?;
            if params.residual != 0 {
                params.residual_map = residual_map(self.precision, &params, output, residual.count(&added))?;
            }
        }
        if op.statistics && quads_fit(layout) {
            params.partials = block.at(op.scratch, frames.len() as u64 * geometry::partial_bytes(layout, input))?;
        }
        for (params, frame) in params.frame.iter_mut().zip(frames) {
            *params = FrameParams {
                bias: i32::from(frame.bias),
                out: i64::from(out.of(block.address(frame.out))),
                ..FrameParams::default()
            };
            for term in frame.terms.iter() {
                if u64::from(term.slab) == layout.slabs {
                    params.slot[3] = side.map_or(-1, |(side, _)| side.of(block.address(term.frame)));
                } else {
                    let at = params.terms as usize;
                    params.slab[at] = i32::from(term.slab);
                    match (parts, far(term.frame)) {
                        (Some([near, second]), Some(far)) => {
                            params.slot[at] = near.of(block.address(term.frame));
                            params.far[at] = second.of(block.address(far));
                        }
                        _ => params.slot[at] = main.of(block.address(term.frame)),
                    }
                    params.terms += 1;
                }
            }
            if let Some(added) = frame.residual {
                params.residual = i64::from(residual.of(block.address(added)));
            }
        }

        if let Some(bytes) = geometry::sums_bytes(layout, input) {
            let sums = |at: Option<Frame>| at.map_or(Ok(0), |frame| block.at(frame.0, bytes));
            params.before = sums(op.sums.before)?;
            params.after = sums(op.sums.after.map(|onward| onward.sums))?;
        }
        if let Some(term) = onward {
            params.frame[frames.len()] = FrameParams {
                slot: [main.of(block.address(term.frame)), 0, 0, -1],
                slab: [i32::from(term.slab), 0, 0, 0],
                terms: 1,
                ..FrameParams::default()
            };
        }

        if let Some(NextNorm { weights, layout, statistics }) = norm {
            let at = |frame: &Frame| block.at(frame.0, layout.groups * 8);
            let addresses = statistics.iter().map(at).collect::<Result<Vec<u64>>>()?;
            let slots = Slots::new(addresses.iter().copied(), 8)?;
            params.norm = self.norm(weights, layout, slots.address(), slots.bytes() / 8)?;
            for (slot, address) in params.statistics.iter_mut().zip(addresses) {
                *slot = slots.of(address);
            }
        }

        let rows = params.tiles_y * params.frames * params.column_tiles;
        let tiles = match Kind::of(layout)? {
            Kind::In => {
                params.run = self.in_run(params.tiles_x as u32, rows as u32);
                (params.tiles_x + params.run - 1) / params.run * rows
            }
            _ => params.tiles_x * rows * params.phases,
        } as u32;
        let blocks = if choice.hopper { tiles.min(self.context.gpu.multiprocessors) } else { tiles };
        // SAFETY: `ConvParams` has the kernel's layout, and all that is reached by it is in `block` and `weights`, which outlive
        // the stream's work: freeing either waits for it.
        unsafe { choice.kernel.collect(stream, [blocks, 1], choice.threads, &params)? };
        Ok(params)
    }

    /// Tells a launch where input frames lie, or these columns of them.
    fn put_place(
        &self,
        params: &mut ConvParams,
        at: usize,
        (slots, addresses): (Slots, &[u64]),
        columns: Range<u64>,
        hopper: bool,
    ) -> Result<()> {
        params.place[at] = Place {
            frames: slots.address(),
            slot_bytes: slots.bytes(),
            width: (columns.end - columns.start) as i32,
            first: columns.start as i32,
        };
        if hopper {
            let source = &params.source[usize::from(at == SHORTCUT)];
            params.map[at] = patch_map(self.precision, source, &params.place[at], slots.count(addresses))?;
        }
        Ok(())
    }

    /// Tiles that a block of the pixel kernel goes through, of so many in a row: as many as share what each block loads, about as
    /// long as it takes for a tile, but no more than leave something to do for every multiprocessor.
    fn in_run(&self, tiles_x: u32, rows: u32) -> i32 {
        let gpu = &self.context.gpu;
        // A block may have about all the shared memory of a multiprocessor.
        let at_once = gpu.multiprocessors * (gpu.shared_bytes / in_shared(self.precision)).clamp(1, IN_BLOCKS);
        let time = |run: &u32| (tiles_x.div_ceil(*run) * rows).div_ceil(at_once) * (run + 1);
        (1..=most_in_run(self.precision)).rev().min_by_key(time).unwrap_or(1) as i32
    }

    /// Sees to it that a launch touches nothing but its block. Nobody could tell afterwards which one did.
    fn check_frame(
        &self,
        (block, layout): (&Block, &ConvLayout),
        (input, seen, parted): (FrameShape, u64, Option<Parted>),
        (output, rows): (FrameShape, Range<u64>),
        frame: &ConvFrame,
    ) -> Result<()> {
        let bytes = |rows: u64, shape: FrameShape| self.precision.data_bytes(FrameShape { height: rows, ..shape });
        let holds = |frame: Frame, from: u64, rows: u64, shape: FrameShape| {
            block.at(frame.0.wrapping_add(bytes(from, shape)), bytes(rows, shape)).map(|_| ())
        };
        for term in frame.terms.iter() {
            match layout.shortcut {
                Some(cin) if u64::from(term.slab) == layout.slabs => {
                    holds(term.frame, 0, rows.end - rows.start, output.with_channels(cin))?
                }
                _ => match parted.and_then(|parted| Some((parted.columns, parted.far(term.frame)?))) {
                    Some((columns, far)) => {
                        let part = |columns: Range<u64>| FrameShape { width: columns.end - columns.start, ..input };
                        holds(term.frame, 0, seen, part(columns.near()))?;
                        holds(far, 0, seen, part(columns.far()))?;
                    }
                    None => holds(term.frame, 0, seen, input)?,
                },
            }
        }
        let by = geometry::output_rows(layout);
        let mut like_output = [Some(frame.out), frame.residual].into_iter().flatten();
        like_output.try_for_each(|frame| holds(frame, rows.start * by, (rows.end - rows.start) * by, output))
    }

    /// Brings the statistics of what a convolution made to these addresses, if the layer has any.
    pub(in crate::backend::cuda) fn launch_statistics(
        &self,
        (layout, input, wanted): (&ConvLayout, FrameShape, bool),
        conv: &ConvParams,
        statistics: &[u64],
    ) -> Result<()> {
        if !wanted {
            return Ok(());
        }
        let shape = layout.window.output(input, layout.cout);
        let (slots, count) = (Slots::new(statistics.iter().copied(), 8)?, statistics.len());
        let group_channels = (layout.cout / layout.groups) as i32;
        let slot = std::array::from_fn(|i| statistics.get(i).map_or(0, |address| slots.of(*address)));
        let (statistics, stride) = (slots.address(), slots.bytes() / 8);
        let grid = [layout.groups as u32, count as u32];
        if quads_fit(layout) {
            let params = FinalizeParams {
                partials: conv.partials,
                statistics,
                stride,
                quads: conv.column_tiles * COLUMNS as i32 / 4,
                group_quads: group_channels / 4,
                groups: layout.groups as i32,
                phases: conv.phases,
                height: conv.height,
                width: conv.width,
                eps: EPS,
                slot,
            };
            // SAFETY: as in `launch_conv`.
            unsafe { self.kernels.norm_finalize.collect(&self.stream, grid, 256, &params) }
        } else {
            let params = StatisticsParams {
                input: conv.out,
                statistics,
                stride,
                slot_bytes: conv.out_slot_bytes,
                pixels: shape.pixels() as i64,
                channels: conv.cout,
                group_channels,
                groups: layout.groups as i32,
                eps: EPS,
                slot,
            };
            // SAFETY: as in `launch_conv`.
            unsafe { self.kernels.norm_statistics.collect(&self.stream, grid, 256, &params) }
        }
    }
}

/// Whether groups are made of the fours of channels that partial statistics are kept of.
pub fn quads_fit(layout: &ConvLayout) -> bool {
    (layout.cout / layout.groups.max(1)).is_multiple_of(4)
}

fn distinct(offsets: impl Iterator<Item = u64>) -> Vec<u64> {
    let mut all: Vec<u64> = offsets.collect();
    all.sort_unstable();
    all.dedup();
    all
}

/// Tiles of 8 x 32 pixels where they waste less than those of 16 x 16, or where those would reach beyond the rows.
fn hopper_tile(grid: FrameShape, rows: &Range<u64>) -> (i32, i32) {
    let tiles = |rows: u64, columns: u64| grid.height.div_ceil(rows) * grid.width.div_ceil(columns);
    let whole =
        |tile: u64| rows.start.is_multiple_of(tile) && (rows.end.is_multiple_of(tile) || rows.end == grid.height);
    if tiles(8, 32) < tiles(16, 16) || !whole(16) { (8, 32) } else { (16, 16) }
}

/// Patches of a chunk of channels by `pitch` columns by `rows` rows of a source's frames.
fn patch_map(precision: Precision, source: &Source, place: &Place, slots: u64) -> Result<TensorMap> {
    let (channels, width, height) = (source.channels as u64, place.width as u64, source.height as u64);
    let (step, row) = (source.stride as u32, width * channels * precision.bytes());
    tensor_map(
        precision,
        place.frames,
        &[channels, width, height, slots],
        &[channels * precision.bytes(), row, place.slot_bytes as u64],
        &[precision.chunk() as u32, source.pitch as u32 * step, source.rows as u32 * step, 1],
        &[1, step, step, 1],
    )
}

/// Boxes of a chunk of channels by 8 x 16 pixels of the frames that are added.
fn residual_map(precision: Precision, params: &ConvParams, shape: FrameShape, slots: u64) -> Result<TensorMap> {
    let (channels, row) = (params.cout as u64, shape.width * params.cout as u64 * precision.bytes());
    tensor_map(
        precision,
        params.residual,
        &[channels, shape.width, shape.height, slots],
        &[channels * precision.bytes(), row, params.residual_slot_bytes as u64],
        &[precision.chunk() as u32, 16, 8, 1],
        &[1; 4],
    )
}

/// The same of the output, of one phase at a time: with four phases, two neighbouring columns count as channels side by
/// side, and two rows as one more dimension.
fn output_map(precision: Precision, params: &ConvParams, shape: FrameShape, slots: u64) -> Result<TensorMap> {
    let (channels, sides) = (params.cout as u64, if params.phases == 4 { 2 } else { 1 });
    let row = shape.width * channels * precision.bytes();
    tensor_map(
        precision,
        params.out,
        &[channels * sides, shape.width / sides, sides, shape.height / sides, slots],
        &[channels * sides * precision.bytes(), row, row * sides, params.out_slot_bytes as u64],
        &[precision.chunk() as u32, 16, 1, 8, 1],
        &[1; 5],
    )
}

/// A region of elements as the copy engine sees it: swizzled boxes, zeros outside. `strides` in bytes, of all
/// dimensions but the first.
fn tensor_map(
    precision: Precision,
    address: u64,
    dims: &[u64],
    strides: &[u64],
    box_dims: &[u32],
    steps: &[u32],
) -> Result<TensorMap> {
    use sys::CUtensorMapDataType as T;
    debug_assert!(strides.len() + 1 == dims.len() && box_dims.len() == dims.len() && steps.len() == dims.len());
    let element = match precision {
        Precision::Fp16 => T::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        Precision::Bf16 => T::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        Precision::Fp32 => T::CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
    };
    let mut map = TensorMap::default();
    // SAFETY: every list has an entry for each dimension; the map is 128 bytes, aligned to 64, as the driver asks.
    let answer = unsafe {
        sys::cuTensorMapEncodeTiled(
            std::ptr::from_mut(&mut map).cast(),
            element,
            dims.len() as u32,
            address as *mut _,
            dims.as_ptr(),
            strides.as_ptr(),
            box_dims.as_ptr(),
            steps.as_ptr(),
            sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
            sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
            sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    };
    check("describing frames to the copy engine", answer)?;
    Ok(map)
}
