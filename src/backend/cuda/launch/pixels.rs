//! Launches the kernels between tensors and activations, and the one that blends tiles.

use cudarc::driver::sys;

use super::launcher::Launcher;
use super::params::{self, BlendParams, LoadParams, MappedLoadParams, MappedStoreParams, StoreParams};
use super::queue::JobBlock;
use super::tiling::{self, MAX_MAPS, PIXEL_THREADS};
use crate::backend::cuda::driver::{DeviceBlock, HostFlags, check};
use crate::backend::gpu::{AddressedBlock, LaunchPixels, NonFiniteFlag, RowSizes, TensorFrame};
use crate::error::{Error, Result};
use crate::ir::{BlendTile, ChannelMaps, Fades, FrameShape, LoadTensor, StoreTensor};

fn grid(pixels: u64) -> [u32; 2] {
    [pixels.div_ceil(u64::from(PIXEL_THREADS)) as u32, 1]
}

/// Maps of channels, as kernels see them.
fn channel_maps(of: &ChannelMaps) -> Result<params::ChannelMaps> {
    let count = of.maps.len();
    if count > MAX_MAPS {
        return Err(Error::Argument(format!(
            "latents: model, but a GPU scales {MAX_MAPS} channels of latents at most, and this model has {count}; set \
             latents to raw, or use device \"cpu\""
        )));
    }
    let (mut mul, mut add) = ([0.0; MAX_MAPS], [0.0; MAX_MAPS]);
    for (channel, map) in of.maps.iter().enumerate() {
        (mul[channel], add[channel]) = (map.mul, map.add);
    }
    Ok(params::ChannelMaps { side: of.side as i32, mul, add })
}

impl Launcher {
    /// Copies fades to the device; their addresses, null where there are none.
    fn fades(&self, block: &DeviceBlock, scratch: u64, shape: FrameShape, fades: Option<Fades>) -> Result<[u64; 2]> {
        let Some(Fades { rows, columns }) = fades else { return Ok([0, 0]) };
        let mut addresses = [0; 2];
        for (address, (offset, fade)) in addresses.iter_mut().zip([(0, rows), (shape.height * 4, columns)]) {
            let bytes = size_of_val(fade);
            *address = block.at(scratch + offset, bytes as u64)?;
            let stream = self.queue.stream().handle();
            // SAFETY: the region is that long. The driver has copied pageable memory when it returns.
            let answer = unsafe { sys::cuMemcpyHtoDAsync_v2(*address, fade.as_ptr().cast(), bytes, stream) };
            check("copying fades to the GPU", answer)?;
        }
        Ok(addresses)
    }
}

impl LaunchPixels for Launcher {
    fn load(&self, block: &JobBlock, op: &LoadTensor, from: &TensorFrame, flags: &HostFlags) -> Result<()> {
        let params = LoadParams {
            from: from.strided(&**block)?,
            into: block.at(op.into.0, self.sizes.data_bytes(op.shape))?,
            nonfinite: flags.at(NonFiniteFlag::Loaded),
            height: op.shape.height as i32,
            width: op.shape.width as i32,
            channels: op.shape.channels as i32,
            stride: tiling::input_stride(op.shape.channels) as i32,
            patch: op.patch as i32,
            mul: op.map.mul,
            add: op.map.add,
        };
        let (stream, grid) = (self.queue.stream(), grid(op.shape.pixels()));
        let Some(channels) = &op.channels else {
            // SAFETY: the parameters have the kernel's layout, and point at memory that outlives the work.
            return unsafe { self.kernels.load.launch(stream, grid, PIXEL_THREADS, &params) };
        };
        let [top, left] = op.within_packed().map(|start| start as i32);
        let params = MappedLoadParams { load: params, maps: channel_maps(channels)?, top, left };
        // SAFETY: as above.
        unsafe { self.kernels.load_mapped.launch(stream, grid, PIXEL_THREADS, &params) }
    }

    fn store(
        &self,
        block: &JobBlock,
        op: &StoreTensor,
        into: &TensorFrame,
        scratch: u64,
        flags: &HostFlags,
    ) -> Result<()> {
        let into = into.strided(&**block)?;
        let [rows, columns] = self.fades(block, scratch, op.shape, op.divide)?;
        let (clamp_low, clamp_high) = op.clamp.unwrap_or((f32::NEG_INFINITY, f32::INFINITY));
        let params = StoreParams {
            into,
            from: block.at(op.from.0, self.sizes.data_bytes(op.shape))?,
            rows,
            columns,
            nonfinite: flags.at(NonFiniteFlag::Stored),
            width: op.shape.width as i32,
            stride: tiling::output_stride(op.shape.channels) as i32,
            channel: op.channel as i32,
            patch: op.patch as i32,
            logvar: op.sample.map_or(-1, |sample| sample.logvar_channel as i32),
            clamp_low,
            clamp_high,
            mul: op.map.mul,
            add: op.map.add,
            seed: op.sample.map_or(0, |sample| sample.seed),
            batch: op.clip as u32,
            frame: op.clip_frame as u32,
        };
        let (stream, grid) = (self.queue.stream(), grid(into.height as u64 * into.width as u64));
        let Some(channels) = &op.channels else {
            // SAFETY: as in `load`.
            return unsafe { self.kernels.store.launch(stream, grid, PIXEL_THREADS, &params) };
        };
        let params = MappedStoreParams { store: params, maps: channel_maps(channels)? };
        // SAFETY: as in `load`.
        unsafe { self.kernels.store_mapped.launch(stream, grid, PIXEL_THREADS, &params) }
    }

    fn blend(&self, block: &JobBlock, op: &BlendTile, scratch: u64) -> Result<()> {
        let [rows, columns] = self.fades(block, scratch, op.into_shape, Some(op.fades))?;
        let params = BlendParams {
            from: block.at(op.from.0, self.sizes.data_bytes(op.from_shape))?,
            into: block.at(op.into.0, self.sizes.data_bytes(op.into_shape))?,
            rows,
            columns,
            height: op.from_shape.height as i32,
            width: op.from_shape.width as i32,
            into_width: op.into_shape.width as i32,
            top: op.top as i32,
            left: op.left as i32,
            stride: tiling::output_stride(op.into_shape.channels) as i32,
            clear: if op.clear { op.into_shape.height as i32 } else { 0 },
        };
        let pixels = if op.clear { op.into_shape.pixels() } else { op.from_shape.pixels() };
        // SAFETY: as in `load`.
        unsafe { self.kernels.blend.launch(self.queue.stream(), grid(pixels), PIXEL_THREADS, &params) }
    }
}
