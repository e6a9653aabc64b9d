//! A model on a device, as planning sees it. Must not know weights, memory or runs.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use super::settings::{Latents, Settings};
use crate::backend::DeviceFacts;
use crate::error::{Error, Result};
use crate::ir::{CacheFormat, ConvLayout, DeviceProfile, FrameShape, Norm};
use crate::model::checkpoint::CheckpointFile;
use crate::model::families::LatentMaps;
use crate::model::{Direction, Network};
use crate::plan::Target;
use crate::thread_pool;

pub struct DeviceModel<D> {
    pub device: Arc<D>,
    /// By direction, in the form that the device computes.
    networks: [Arc<Network>; 2],
    pub latents: LatentMaps,
    /// As the host has them.
    pub settings: Settings,
}

impl<D: DeviceFacts> DeviceModel<D> {
    /// Fails if the device has no kernels for what the checkpoint or the settings ask for.
    pub fn new(device: Arc<D>, file: &CheckpointFile, settings: Settings) -> Result<DeviceModel<D>> {
        let latents = latent_maps(&settings, file)?;
        if settings.cache == CacheFormat::U8 && device.sizes().u8_frame_bytes(FrameShape::new(1, 1, 8)).is_none() {
            return Err(Error::Argument("cache: u8 needs a GPU; set cache to exact on the CPU".into()));
        }
        let network = |direction: Direction| -> Result<Arc<Network>> {
            let mut network = Network::new(&file.model, direction)?.for_device(device.profile().paired_layers());
            network.geometry.packing = latents.packing;
            let network = with_caches(network, settings.cache)?;
            let layouts: Vec<ConvLayout> = network.layers.iter().map(|layer| layer.layout).collect();
            device.check_layers(&layouts, &network.attention_channels())?;
            Ok(Arc::new(network))
        };
        let networks = [network(Direction::Encode)?, network(Direction::Decode)?];
        Ok(DeviceModel { device, networks, latents, settings })
    }

    pub fn network(&self, direction: Direction) -> &Arc<Network> {
        &self.networks[direction as usize]
    }

    /// How the device computes: its arithmetic and its precision.
    pub fn arithmetic(&self) -> String {
        format!("{} in {}", self.device.arithmetic(), self.device.precision().name())
    }

    /// Runs `work` on the device's own threads, if it computes with some; else on at most as many as the settings
    /// allow.
    pub fn with_threads<R>(&self, work: impl FnOnce() -> R) -> R {
        thread_pool::with_threads(self.device.pool(), self.settings.threads, work)
    }

    /// The device, as the planner sees it. Rates that the host gives replace those of `profile`.
    pub fn target<'a>(&'a self, mut profile: DeviceProfile, cancel: &'a AtomicBool) -> Target<'a> {
        profile.rates = self.settings.rates.or(profile.rates);
        Target::new(profile, self.device.sizes(), self.networks[0].norm.groups()).with_cancel(cancel)
    }
}

/// The latents that the settings ask for.
pub fn latent_maps(settings: &Settings, file: &CheckpointFile) -> Result<LatentMaps> {
    match settings.latents {
        Latents::Raw => Ok(LatentMaps::raw(f64::from(settings.scaling_factor))),
        Latents::Model => LatentMaps::of_model(file, settings.latent_format),
    }
}

fn with_caches(network: Network, cache: CacheFormat) -> Result<Network> {
    match cache {
        CacheFormat::Exact => Ok(network),
        CacheFormat::U8 if network.norm == Norm::Pixel => Err(Error::Argument(
            "cache: u8 is for models with norms of groups; this one has norms of pixels: set cache to exact".into(),
        )),
        CacheFormat::U8 => Ok(network.with_u8_caches()),
    }
}
