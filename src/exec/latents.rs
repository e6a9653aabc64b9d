//! From the latents of the network to those that the host exchanges with a diffusion model.

use std::io::Read;
use std::path::Path;

use super::settings::{Latents, Settings};
use crate::error::{Error, Result};
use crate::file;
use crate::ir::{Affine, ChannelMaps};
use crate::model::families::{LatentFormat, LatentScaling};
use crate::model::{Checkpoint, Direction, Model};

/// What happens to latents on the way to the host, and back.
#[derive(Debug, Clone, PartialEq)]
pub struct LatentMaps {
    /// Pixels of latent that are one in the host's tensors, in rows and columns alike.
    pub packing: u64,
    /// One for all channels, or one for each channel of the host's tensors.
    out: Vec<Affine>,
    back: Vec<Affine>,
}

impl LatentMaps {
    /// What the settings ask for. `open` opens the checkpoint at `path`, which may have statistics.
    pub fn new(
        settings: &Settings,
        model: &Model,
        path: &Path,
        open: impl FnOnce() -> Result<Checkpoint>,
    ) -> Result<LatentMaps> {
        if settings.latents == Latents::Raw {
            return Ok(LatentMaps::scaled(1, &[f64::from(settings.scaling_factor)], &[0.0]));
        }
        Ok(match format(settings, model, path)? {
            LatentScaling::Scaled { scale, shift } => LatentMaps::scaled(1, &[scale], &[shift]),
            LatentScaling::Standardised { mean, deviation } => {
                let scales: Vec<f64> = deviation.iter().map(|deviation| deviation.recip()).collect();
                LatentMaps::scaled(1, &scales, mean)
            }
            LatentScaling::Packed { side, mean, variance, epsilon } => {
                let checkpoint = open()?;
                let read = |name: &str| -> Result<Vec<f64>> {
                    let tensor = checkpoint.tensor(name)?;
                    let mut values = vec![0.0; tensor.elements()];
                    tensor.read_f64(&mut values).map(|()| values)
                };
                let scales: Vec<f64> = read(variance)?.iter().map(|v| (v + epsilon).sqrt().recip()).collect();
                LatentMaps::scaled(side, &scales, &read(mean)?)
            }
        })
    }

    /// `(z - shift) * scale`.
    fn scaled(packing: u64, scales: &[f64], shifts: &[f64]) -> LatentMaps {
        let both = || scales.iter().zip(shifts);
        let out = |(scale, shift): (&f64, &f64)| Affine { mul: *scale as f32, add: (0.0 - shift * scale) as f32 };
        // The reciprocal of what multiplies on the way out, so that a round trip gives the same latents.
        let back = |(scale, shift): (&f64, &f64)| Affine { mul: 1.0 / *scale as f32, add: *shift as f32 };
        LatentMaps { packing, out: both().map(out).collect(), back: both().map(back).collect() }
    }

    fn maps(&self, direction: Direction) -> &[Affine] {
        if direction == Direction::Encode { &self.out } else { &self.back }
    }

    /// The map of all channels.
    pub fn map(&self, direction: Direction) -> Affine {
        self.maps(direction)[0]
    }

    /// The maps of the channels, where they differ.
    pub fn channels(&self, direction: Direction) -> Option<ChannelMaps<'_>> {
        let maps = self.maps(direction);
        (maps.len() > 1).then_some(ChannelMaps { side: self.packing, maps })
    }
}

/// The scaling of the diffusion model that the checkpoint belongs to.
fn format(settings: &Settings, model: &Model, path: &Path) -> Result<LatentScaling> {
    let names = |formats: &[LatentFormat]| formats.iter().map(|format| format.name).collect::<Vec<_>>().join(", ");
    if let Some(asked) = settings.latent_format {
        let found = model.latents.iter().find(|format| format.name == asked);
        return found.map(|format| format.scaling).ok_or_else(|| {
            let fitting = names(&model.latents);
            Error::Argument(format!(
                "latent_format: {asked} has other tensors than this checkpoint; it may be {fitting}"
            ))
        });
    }
    match &model.latents[..] {
        [format] => Ok(format.scaling),
        formats => from_config(&path.with_file_name("config.json")).ok_or_else(|| {
            let fitting = names(formats);
            Error::Argument(match formats {
                [] => {
                    "latents: model, but no published model has latents as this checkpoint; set latents to raw".into()
                }
                _ => format!(
                    "latents: model, but the checkpoint's tensors fit several models; set latent_format to one of \
                     {fitting}, or put the model's config.json beside the checkpoint"
                ),
            })
        }),
    }
}

/// The longest configuration that is read. Those of diffusers have about 1 KiB.
const MAX_CONFIG: u64 = 1 << 20;

/// What diffusers writes beside an autoencoder's weights.
fn from_config(path: &Path) -> Option<LatentScaling> {
    let mut text = Vec::new();
    file::open_regular(path).ok()?.0?.take(MAX_CONFIG).read_to_end(&mut text).ok()?;
    let config: serde_json::Value = serde_json::from_slice(&text).ok()?;
    let is_autoencoder = config["_class_name"].as_str().is_some_and(|class| class.starts_with("AutoencoderKL"));
    let scale = config["scaling_factor"].as_f64().filter(|_| is_autoencoder)?;
    Some(LatentScaling::Scaled { scale, shift: config["shift_factor"].as_f64().unwrap_or(0.0) })
}
