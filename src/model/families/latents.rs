//! From the latents of the network to those that the host exchanges with a diffusion model.

use std::io::Read;
use std::path::Path;

use super::{LatentFormat, LatentScaling};
use crate::error::{Error, Result};
use crate::file;
use crate::ir::{Affine, ChannelMaps};
use crate::model::checkpoint::CheckpointFile;
use crate::model::geometry::Direction;

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
    /// As the network has them, times a factor.
    pub fn raw(factor: f64) -> LatentMaps {
        LatentMaps::scaled(1, &[factor], &[0.0])
    }

    /// As a published model has them: the one of this name, or what the checkpoint says. The checkpoint may have
    /// statistics.
    pub fn of_model(file: &CheckpointFile, name: Option<&str>) -> Result<LatentMaps> {
        Ok(match scaling(file, name)? {
            LatentScaling::Scaled { scale, shift } => LatentMaps::scaled(1, &[scale], &[shift]),
            LatentScaling::Standardised { mean, deviation } => {
                let scales: Vec<f64> = deviation.iter().map(|deviation| deviation.recip()).collect();
                LatentMaps::scaled(1, &scales, mean)
            }
            LatentScaling::Packed { side, mean, variance, epsilon } => {
                let checkpoint = file.open()?;
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
fn scaling(file: &CheckpointFile, asked: Option<&str>) -> Result<LatentScaling> {
    let formats: &[LatentFormat] = &file.model.latents;
    let fitting = || formats.iter().map(|format| format.name).collect::<Vec<_>>().join(", ");
    let found = match (asked, formats) {
        (Some(asked), _) => formats.iter().find(|format| format.name == asked).map(|format| format.scaling),
        (None, [format]) => Some(format.scaling),
        (None, _) => from_config(&file.path.with_file_name("config.json")),
    };
    let unknown = || match (asked, formats) {
        (Some(asked), _) => {
            format!("latent_format: {asked} has other tensors than this checkpoint; it may be {}", fitting())
        }
        (None, []) => {
            "latents: model, but no published model has latents as this checkpoint; set latents to raw".into()
        }
        (None, _) => format!(
            "latents: model, but the checkpoint's tensors fit several models; set latent_format to one of {}, or put \
             the model's config.json beside the checkpoint",
            fitting()
        ),
    };
    found.ok_or_else(|| Error::Argument(unknown()))
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
