//! Makes activations of the frames of tensors, and tensors of activations. A tensor on the device is read and written
//! in place; the frames of one in host memory pass through a place of their own on the device.

use cudarc::driver::sys;

use crate::backend::cuda::Cuda;
use crate::backend::cuda::driver::device::check;
use crate::backend::cuda::driver::memory::Block;
use crate::backend::cuda::launch::params::{BlendParams, LoadParams, StoreParams, Strided};
use crate::backend::cuda::launch::tiling as geometry;
use crate::backend::cuda::offload::compact::{Area, Piece};
use crate::backend::cuda::offload::staging::Transfers;
use crate::backend::{Blend, BlendOp, LoadOp, StoreOp};
use crate::error::{Error, Result};
use crate::tensor::{DType, FrameShape, Place, View};

fn strided(data: u64, dtype: DType, channels: u64, area: Area, [by_channel, by_row, by_column]: [i64; 3]) -> Strided {
    Strided {
        data,
        by_channel,
        by_row,
        by_column,
        dtype: dtype as u32,
        channels: channels as i32,
        height: area.rows as i32,
        width: area.columns as i32,
    }
}

/// A tensor on the device, from `area` on.
fn in_place(view: &View, batch: u64, frame: u64, area: Area) -> Strided {
    let [_, by_channel, _, by_row, by_column] = view.strides();
    let offset = (area.top as i64 * by_row + area.left as i64 * by_column) * view.dtype().bytes() as i64;
    let data = (view.frame(batch, frame).addr() as u64).wrapping_add_signed(offset);
    strided(data, view.dtype(), view.shape().channels, area, [by_channel, by_row, by_column])
}

/// Whoever made the view vouches for the frames it has, and for no other.
fn check_frame(view: &View, batch: u64, frame: u64) -> Result<()> {
    let shape = view.shape();
    if batch < shape.batch && frame < shape.frames {
        return Ok(());
    }
    Err(Error::Internal(format!("frame {frame} of clip {batch} is not in a tensor {shape}")))
}

fn blocks(pixels: u64) -> [u32; 2] {
    [pixels.div_ceil(256) as u32, 1]
}

impl Cuda {
    pub(in crate::backend::cuda) fn launch_load(
        &self,
        block: &Block,
        transfers: &mut Transfers,
        op: &LoadOp,
    ) -> Result<()> {
        check_frame(op.from, op.batch, op.frame)?;
        let host = op.from.shape();
        let (top, left) = (op.top.min(host.height - 1), op.left.min(host.width - 1));
        let rows = (host.height - top).min(op.shape.height);
        let area = Area { top, left, rows, columns: (host.width - left).min(op.shape.width) };
        let piece = (op.from.place() == Place::Cpu).then(|| Piece::new(op.from, op.batch, op.frame, area));
        let from = match &piece {
            Some(piece) => {
                let staged = block.at(op.staging + transfers.upload_offset(piece), piece.bytes())?;
                transfers.upload(piece, staged, &self.stream)?;
                strided(staged, op.from.dtype(), host.channels, area, piece.strides())
            }
            None => in_place(op.from, op.batch, op.frame, area),
        };
        let params = LoadParams {
            from,
            into: block.at(op.into.0, self.precision.data_bytes(op.shape))?,
            height: op.shape.height as i32,
            width: op.shape.width as i32,
            stride: geometry::input_stride(op.shape.channels) as i32,
            mul: op.map.mul,
            add: op.map.add,
        };
        // SAFETY: the parameters have the kernel's layout; what they point at outlives the stream's work.
        unsafe { self.kernels.load.launch(&self.stream, blocks(op.shape.pixels()), 256, &params)? };
        piece.map_or(Ok(()), |piece| transfers.uploaded_is_read(&piece, &self.stream))
    }

    pub(in crate::backend::cuda) fn launch_store(
        &self,
        block: &Block,
        transfers: &mut Transfers,
        op: &StoreOp,
    ) -> Result<()> {
        check_frame(op.into, op.batch, op.frame)?;
        let (view, area) = (op.into, Area::whole(op.into));
        let piece = (view.place() == Place::Cpu).then(|| Piece::new(view, op.batch, op.frame, area));
        let into = match &piece {
            Some(piece) => {
                let staged = block.at(op.staging + transfers.download_offset(piece), piece.bytes())?;
                transfers.before_download(piece, &self.stream)?;
                strided(staged, view.dtype(), view.shape().channels, area, piece.strides())
            }
            None => in_place(view, op.batch, op.frame, area),
        };
        let [rows, columns] = self.fades(block, op.scratch, op.shape, op.divide)?;
        let (clamp_low, clamp_high) = op.clamp.unwrap_or((f32::NEG_INFINITY, f32::INFINITY));
        let params = StoreParams {
            into,
            from: block.at(op.from.0, self.precision.data_bytes(op.shape))?,
            rows,
            columns,
            width: op.shape.width as i32,
            stride: geometry::output_stride(op.shape.channels) as i32,
            channel: op.channel as i32,
            logvar: op.sample.map_or(-1, |sample| sample.logvar_channel as i32),
            clamp_low,
            clamp_high,
            mul: op.map.mul,
            add: op.map.add,
            seed: op.sample.map_or(0, |sample| sample.seed),
            batch: op.batch as u32,
            frame: op.clip_frame as u32,
        };
        // SAFETY: as in `launch_load`.
        unsafe { self.kernels.store.launch(&self.stream, blocks(area.rows * area.columns), 256, &params)? };
        match piece {
            Some(piece) => transfers.download(&piece, into.data, &self.stream),
            None => Ok(()),
        }
    }

    pub(in crate::backend::cuda) fn launch_blend(&self, block: &Block, op: &BlendOp) -> Result<()> {
        let [rows, columns] = self.fades(block, op.scratch, op.into_shape, Some(op.fade))?;
        let params = BlendParams {
            from: block.at(op.from.0, self.precision.data_bytes(op.from_shape))?,
            into: block.at(op.into.0, self.precision.data_bytes(op.into_shape))?,
            rows,
            columns,
            height: op.from_shape.height as i32,
            width: op.from_shape.width as i32,
            into_width: op.into_shape.width as i32,
            top: op.top as i32,
            left: op.left as i32,
            stride: geometry::output_stride(op.into_shape.channels) as i32,
            clear: if op.clear { op.into_shape.height as i32 } else { 0 },
        };
        let pixels = if op.clear { op.into_shape.pixels() } else { op.from_shape.pixels() };
        // SAFETY: as in `launch_load`.
        unsafe { self.kernels.blend.launch(&self.stream, blocks(pixels), 256, &params) }
    }

    /// Brings fades to the device. Null where there are none.
    fn fades(&self, block: &Block, scratch: u64, shape: FrameShape, fades: Option<Blend>) -> Result<[u64; 2]> {
        let Some(Blend { rows, columns }) = fades else { return Ok([0, 0]) };
        let mut places = [0; 2];
        for (place, (offset, fade)) in places.iter_mut().zip([(0, rows), (shape.height * 4, columns)]) {
            let bytes = size_of_val(fade);
            *place = block.at(scratch + offset, bytes as u64)?;
            // SAFETY: the region is that long. From pageable memory, the driver has taken its copy when it returns.
            let answer =
                unsafe { sys::cuMemcpyHtoDAsync_v2(*place, fade.as_ptr().cast(), bytes, self.stream.handle()) };
            check("copying fades to the GPU", answer)?;
        }
        Ok(places)
    }
}
