//! Launches convolutions, whole or in bands.

use std::ops::Range;

use super::params::{ConvParams, MAIN, MAX_TERMS, OutFrame, SHORTCUT, Source, Term};
use super::{Launcher, per_frame};
use crate::backend::gpu::{
    self, AddressedBlock, ConvBand, ConvLaunch, LaunchConv, RowSizes, WeightAddresses, conv_products, conv_whole,
};
use crate::backend::vulkan::driver::{DeviceBlock, Shader};
use crate::backend::vulkan::sizes::{self, K_BLOCK, MAX_FRAMES, TILE, channel_stride, padded_outputs, tile_channels};
use crate::error::{Error, Result};
use crate::ir::{ConvFrame, ConvLayout, ConvOp, DeviceOffset, FrameShape, Offsets, Window};

/// What a launch is made of.
struct ConvCase<'a> {
    launcher: &'a Launcher,
    block: &'a DeviceBlock,
    weights: &'a WeightAddresses,
    conv: &'a ConvLaunch<'a>,
    band: &'a ConvBand<'a, Launcher>,
}

impl ConvCase<'_> {
    fn shortcut_shape(&self) -> FrameShape {
        self.conv.output().with_channels(self.conv.layout.shortcut.unwrap_or(0))
    }

    fn params(&self, frames: &[ConvFrame<Offsets>]) -> Result<ConvParams> {
        let (layout, scratch) = (self.conv.layout, self.conv.scratch);
        let sizes = self.launcher.sizes;
        let grid = gpu::tile_grid(layout, self.conv.input);
        let records = match self.conv.statistics && layout.norm.groups() > 0 {
            false => 0,
            true => self.block.at(scratch, frames.len() as u64 * sizes.records_bytes(layout, self.conv.input))?,
        };
        let columns = self.band.split.map(|split| split.columns);
        Ok(ConvParams {
            source: [self.main_source(), self.shortcut_source()],
            bias: self.weights.bias,
            records,
            height: grid.height as i32,
            width: grid.width as i32,
            first_row: self.band.rows.start as i32,
            channel_tiles: sizes.channel_tiles(layout) as i32,
            phases: layout.window.phases() as i32,
            cout: channel_stride(layout.cout) as i32,
            padded_cout: padded_outputs(layout) as i32,
            split_column: columns.map_or(0, |columns| columns.split() as i32),
            resident_width: columns.map_or(0, |columns| columns.resident_width() as i32),
            host_first: columns.map_or(0, |columns| columns.host().start as i32),
            host_width: columns.map_or(0, |columns| columns.host_width() as i32),
            unused: 0,
            frame: per_frame(frames.iter().enumerate().map(|(number, frame)| self.frame(number, frame)))?,
        })
    }

    fn main_source(&self) -> Source {
        let (layout, input) = (self.conv.layout, self.conv.input);
        let channels = channel_stride(layout.cin);
        Source {
            weights: self.weights.slabs,
            slab_bytes: self.launcher.sizes.weight_layout(layout).slab_bytes,
            height: input.height as i32,
            width: input.width as i32,
            first_row: self.band.input_rows.start as i32,
            channels: channels as i32,
            k_blocks: channels.div_ceil(K_BLOCK) as i32,
            side: layout.window.side() as i32,
            stride: if layout.window == Window::Down { 2 } else { 1 },
            offset: if matches!(layout.window, Window::Same | Window::Up) { -1 } else { 0 },
        }
    }

    fn shortcut_source(&self) -> Source {
        let Some(cin) = self.conv.layout.shortcut else { return Source::default() };
        let (shape, channels) = (self.shortcut_shape(), channel_stride(cin));
        Source {
            weights: self.weights.shortcut,
            height: shape.height as i32,
            width: shape.width as i32,
            first_row: self.band.rows.start as i32,
            channels: channels as i32,
            k_blocks: channels.div_ceil(K_BLOCK) as i32,
            side: 1,
            stride: 1,
            ..Source::default()
        }
    }

    /// A region of rows, checked to lie in the block. Its first row begins at `from`.
    fn rows(&self, from: u64, shape: FrameShape, rows: &Range<u64>) -> Result<u64> {
        self.block.at(from, (rows.end - rows.start) * self.launcher.sizes.row_bytes(shape))
    }

    fn frame(&self, number: usize, frame: &ConvFrame<Offsets>) -> Result<OutFrame> {
        let by = gpu::output_rows(self.conv.layout);
        let (output, rows) = (self.conv.output(), self.band.rows.start * by..self.band.rows.end * by);
        let first = rows.start * self.launcher.sizes.row_bytes(output);
        // Outputs and residuals begin where the whole frame would. Only the band's rows are in the block.
        let like_output =
            |at: DeviceOffset| Ok(self.rows(at.0.wrapping_add(first), output, &rows)?.wrapping_sub(first));
        if frame.terms.len() > MAX_TERMS {
            return Err(Error::Internal(format!("a sum of {} terms; the most is {MAX_TERMS}", frame.terms.len())));
        }
        let mut term = [Term::default(); MAX_TERMS];
        for (place, of) in term.iter_mut().zip(&frame.terms) {
            *place = self.term(of)?;
        }
        Ok(OutFrame {
            term,
            residual: frame.residual.map_or(Ok(0), like_output)?,
            target: like_output(frame.out)?,
            terms: frame.terms.len() as u32,
            bias: u32::from(frame.bias),
            record: number as u32,
            unused: 0,
        })
    }

    fn term(&self, term: &crate::ir::Term<Offsets>) -> Result<Term> {
        let (input, slab) = (self.conv.input, u32::from(term.slab));
        if u64::from(term.slab) == self.conv.layout.slabs {
            let frame = self.rows(term.frame.0, self.shortcut_shape(), &self.band.rows)?;
            return Ok(Term { frame, host: 0, slab: 0, source: SHORTCUT });
        }
        let split = self.band.split.and_then(|split| Some((split.columns, split.host_part(term.frame)?)));
        let Some((columns, host)) = split else {
            let frame = self.rows(term.frame.0, input, &self.band.input_rows)?;
            return Ok(Term { frame, host: 0, slab, source: MAIN });
        };
        let part = |width: u64| FrameShape { width, ..input };
        let frame = self.rows(term.frame.0, part(columns.resident_width()), &self.band.input_rows)?;
        let host = self.rows(host.0, part(columns.host_width()), &self.band.input_rows)?;
        Ok(Term { frame, host, slab, source: MAIN })
    }
}

impl Launcher {
    /// By layout and device alone.
    pub fn conv_shader(&self, layout: &ConvLayout) -> Shader {
        let tile = tile_channels(layout);
        match self.matrix() {
            Some(shape) => Shader::ConvMatrix(shape.element, tile),
            None => Shader::Conv(self.sizes.precision, tile),
        }
    }

    fn launch_conv(&self, case: &ConvCase, frames: &[ConvFrame<Offsets>]) -> Result<()> {
        let (layout, rows) = (case.conv.layout, &case.band.rows);
        let params = case.params(frames)?;
        let shader = self.conv_shader(layout);
        let queue = case.band.queue.unwrap_or(&self.queue);
        let columns = (params.width as u32).div_ceil(TILE.1 as u32);
        let depth = frames.len() as u32 * params.phases as u32 * params.channel_tiles as u32;
        // Tiles do not depend on each other, so any rows of tiles may be a launch.
        let tile_rows = (rows.end - rows.start).div_ceil(TILE.0);
        let products = conv_products(layout, case.conv.input, TILE.0).saturating_mul(frames.len() as u64);
        let mut launches = self.limit.launches(tile_rows, products).peekable();
        while let Some(part) = launches.next() {
            let size = [columns, (part.end - part.start) as u32, depth];
            let params = ConvParams { first_row: params.first_row + (part.start * TILE.0) as i32, ..params };
            // SAFETY: the kernel's parameters. All regions were checked, and blocks wait for the queues.
            unsafe { queue.launch(shader, size, &[], |_| params)? };
            // A submission is no longer than a launch may be.
            launches.peek().map_or(Ok(()), |_| queue.flush())?;
        }
        Ok(())
    }
}

impl LaunchConv for Launcher {
    fn conv(&self, block: &DeviceBlock, weights: &WeightAddresses, op: &ConvOp<Offsets>, scratch: u64) -> Result<()> {
        if !op.partial_sums.is_none() {
            return Err(Error::Internal("partial sums were planned, but no kernel keeps them".into()));
        }
        let most = self.limit.pieces(conv_products(&op.layout, op.input, TILE.0)) as usize;
        conv_whole(self, block, weights, &ConvLaunch::of(op, scratch), &op.frames, most.min(MAX_FRAMES))
    }

    fn conv_band(
        &self,
        block: &DeviceBlock,
        weights: &WeightAddresses,
        conv: &ConvLaunch,
        frames: &[ConvFrame<Offsets>],
        band: &ConvBand<Launcher>,
    ) -> Result<()> {
        if band.next_norm.is_some() {
            return Err(Error::Internal("no convolution normalises its output".into()));
        }
        self.launch_conv(&ConvCase { launcher: self, block, weights, conv, band }, frames)
    }
}

/// Tiles begin where the kernel says, in rows of the whole grid.
const _: () = assert!(sizes::TILE.0 == 8 && sizes::TILE.1 == 16 && MAX_FRAMES == 32);
