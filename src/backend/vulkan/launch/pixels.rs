//! Launches the kernels between tensors and activations, and the one that blends tiles.

use super::Launcher;
use super::params::{BlendParams, LoadParams, StoreParams};
use crate::backend::gpu::{AddressedBlock, LaunchPixels, NonFiniteFlag, RowSizes, Strided, TensorFrame, TensorPlace};
use crate::backend::vulkan::driver::{DeviceBlock, HostFlags, LaunchSize, Shader};
use crate::backend::vulkan::sizes::channel_stride;
use crate::error::{Error, Result};
use crate::ir::{BlendTile, ChannelMaps, Fades, LoadTensor, StoreTensor};

/// A thread for each pixel of so many rows.
fn rows_size(height: u64, width: u64) -> LaunchSize {
    [super::workgroups(width), height as u32, 1]
}

/// A tensor's frame, as kernels see it.
fn strided(block: &DeviceBlock, of: &TensorFrame) -> Result<Strided> {
    match of.at {
        TensorPlace::Staged(_) => of.strided(block),
        TensorPlace::Address(_) => {
            Err(Error::Internal("a Vulkan device reads no tensors of the host's on a device".into()))
        }
    }
}

/// Fades of rows, then those of columns, as they travel with the parameters.
fn fade_bytes(fades: Fades) -> Vec<u8> {
    fades.rows.iter().chain(fades.columns).flat_map(|fade| fade.to_ne_bytes()).collect()
}

/// Where fades of rows and columns are, if there are some at `data`.
fn fade_addresses(data: u64, fades: Option<Fades>) -> [u64; 2] {
    fades.map_or([0, 0], |fades| [data, data + size_of_val(fades.rows) as u64])
}

/// Factor and addend of each channel, as they travel with the parameters.
fn map_bytes(channels: Option<ChannelMaps>) -> Vec<u8> {
    let maps = channels.map_or(&[][..], |channels| channels.maps);
    maps.iter().flat_map(|map| [map.mul, map.add]).flat_map(f32::to_ne_bytes).collect()
}

impl LaunchPixels for Launcher {
    fn load(&self, block: &DeviceBlock, op: &LoadTensor, from: &TensorFrame, flags: &HostFlags) -> Result<()> {
        let [top, left] = op.within_packed().map(|start| start as i32);
        let params = LoadParams {
            from: strided(block, from)?,
            into: block.at(op.into.0, self.sizes.data_bytes(op.shape))?,
            nonfinite: flags.address(NonFiniteFlag::Loaded),
            maps: 0,
            height: op.shape.height as i32,
            width: op.shape.width as i32,
            channels: channel_stride(op.shape.channels) as i32,
            own_channels: op.shape.channels as i32,
            mul: op.map.mul,
            add: op.map.add,
            patch: op.patch as i32,
            side: op.side() as i32,
            top,
            left,
        };
        let size = rows_size(op.shape.height, op.shape.width);
        // SAFETY: the kernel's parameters. All regions were checked, and blocks wait for the queues.
        unsafe {
            let with_maps = |maps| LoadParams { maps, ..params };
            self.queue.launch(Shader::Load(self.sizes.precision), size, &map_bytes(op.channels), with_maps)
        }
    }

    fn store(
        &self,
        block: &DeviceBlock,
        op: &StoreTensor,
        into: &TensorFrame,
        _: u64,
        flags: &HostFlags,
    ) -> Result<()> {
        let (clamp_low, clamp_high) = op.clamp.unwrap_or((f32::NEG_INFINITY, f32::INFINITY));
        let seed = op.sample.map_or(0, |sample| sample.seed);
        let (strided, from) = (strided(block, into)?, block.at(op.from.0, self.sizes.data_bytes(op.shape))?);
        let mut data = map_bytes(op.channels);
        let map_length = data.len() as u64;
        let params = |data: u64| {
            let [rows, columns] = fade_addresses(data + map_length, op.divide);
            StoreParams {
                into: strided,
                from,
                rows,
                columns,
                nonfinite: flags.address(NonFiniteFlag::Stored),
                maps: if map_length > 0 { data } else { 0 },
                width: op.shape.width as i32,
                channels: channel_stride(op.shape.channels) as i32,
                channel: op.channel as i32,
                logvar: op.sample.map_or(-1, |sample| sample.logvar_channel as i32),
                clamp_low,
                clamp_high,
                mul: op.map.mul,
                add: op.map.add,
                seed_low: seed as u32,
                seed_high: (seed >> 32) as u32,
                batch: op.clip as u32,
                frame: op.clip_frame as u32,
                patch: op.patch as i32,
                side: op.channels.map_or(1, |channels| channels.side) as i32,
            }
        };
        data.extend(op.divide.map_or(Vec::new(), fade_bytes));
        let size = rows_size(into.rows, into.columns);
        // SAFETY: as in `load`.
        unsafe { self.queue.launch(Shader::Store(self.sizes.precision), size, &data, params) }
    }

    fn blend(&self, block: &DeviceBlock, op: &BlendTile, _: u64) -> Result<()> {
        let from = block.at(op.from.0, self.sizes.data_bytes(op.from_shape))?;
        let into = block.at(op.into.0, self.sizes.data_bytes(op.into_shape))?;
        let params = |data: u64| {
            let [rows, columns] = fade_addresses(data, Some(op.fades));
            BlendParams {
                from,
                into,
                rows,
                columns,
                height: op.from_shape.height as i32,
                width: op.from_shape.width as i32,
                into_height: op.into_shape.height as i32,
                into_width: op.into_shape.width as i32,
                top: op.top as i32,
                left: op.left as i32,
                channels: channel_stride(op.into_shape.channels) as i32,
                clear: i32::from(op.clear),
            }
        };
        let area = if op.clear { op.into_shape } else { op.from_shape };
        let size = rows_size(area.height, area.width);
        // SAFETY: as in `load`.
        unsafe { self.queue.launch(Shader::Blend(self.sizes.precision), size, &fade_bytes(op.fades), params) }
    }
}
