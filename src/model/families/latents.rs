//! The latents of the diffusion model that a checkpoint belongs to, and the way to them from those of the network.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::Path;

use super::{LatentFormat, LatentScaling, Model};
use crate::error::{Error, Result};
use crate::file;
use crate::ir::{Affine, ChannelMaps};
use crate::model::checkpoint::{Checkpoint, CheckpointFile};
use crate::model::geometry::Direction;

/// The latents of the diffusion model that a checkpoint belongs to, in numbers.
#[derive(Debug, Clone, PartialEq)]
pub struct LatentFacts {
    /// Of the published model; empty if a configuration beside the checkpoint has numbers of its own.
    pub name: &'static str,
    /// Side of the square of the network's latent pixels that is one pixel of the host's tensors.
    pub packing: u64,
    pub values: LatentValues,
}

#[derive(Debug, Clone, PartialEq)]
pub enum LatentValues {
    /// `(z - shift) * scale`.
    Scaled { scale: f64, shift: f64 },
    /// `(z - mean) / deviation`, with numbers for each channel of the host's tensors.
    Standardised { means: Vec<f64>, deviations: Vec<f64> },
}

impl LatentFacts {
    /// `read` gives the values of a tensor of the checkpoint.
    fn new(format: LatentFormat, mut read: impl FnMut(&str) -> Result<Vec<f64>>) -> Result<LatentFacts> {
        let (packing, values) = match format.scaling {
            LatentScaling::Scaled { scale, shift } => (1, LatentValues::Scaled { scale, shift }),
            LatentScaling::Standardised { mean, deviation } => {
                (1, LatentValues::Standardised { means: mean.into(), deviations: deviation.into() })
            }
            LatentScaling::Packed { side, mean, variance, epsilon } => {
                let deviations = read(variance)?.iter().map(|v| (v + epsilon).sqrt()).collect();
                (side, LatentValues::Standardised { means: read(mean)?, deviations })
            }
        };
        Ok(LatentFacts { name: format.name, packing, values })
    }

    /// What each value of `latent_format` stands for; `None`: auto. A value that does not fit is left out.
    pub fn of_formats(checkpoint: &Checkpoint) -> Result<BTreeMap<Option<&'static str>, LatentFacts>> {
        let model = checkpoint.model();
        let asked = model.latents.iter().map(|format| Some(format.name)).chain([None]);
        let found = asked.filter_map(|asked| Some((asked, format(asked, model, checkpoint.path()).ok()?)));
        found.map(|(asked, format)| Ok((asked, LatentFacts::new(format, |name| values(checkpoint, name))?))).collect()
    }
}

fn values(checkpoint: &Checkpoint, name: &str) -> Result<Vec<f64>> {
    let tensor = checkpoint.tensor(name)?;
    let mut values = vec![0.0; tensor.elements()];
    tensor.read_f64(&mut values).map(|()| values)
}

/// What happens to latents on the way to the host, and back.
#[derive(Debug, Clone, PartialEq)]
pub struct LatentMaps {
    /// Side of the square of the network's latent pixels that is one pixel of the host's tensors.
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

    /// As a published model has them: the one called `name`. Without a name: the only one that has these tensors, or
    /// what `config.json` beside the checkpoint says. Some checkpoints have mean and variance as tensors.
    pub fn of_model(file: &CheckpointFile, name: Option<&str>) -> Result<LatentMaps> {
        let format = format(name, &file.model, &file.path)?;
        let facts = LatentFacts::new(format, |name| values(&file.open()?, name))?;
        Ok(match facts.values {
            LatentValues::Scaled { scale, shift } => LatentMaps::scaled(facts.packing, &[scale], &[shift]),
            LatentValues::Standardised { means, deviations } => {
                let scales: Vec<f64> = deviations.iter().map(|deviation| deviation.recip()).collect();
                LatentMaps::scaled(facts.packing, &scales, &means)
            }
        })
    }

    /// `(z - shift) * scale`.
    fn scaled(packing: u64, scales: &[f64], shifts: &[f64]) -> LatentMaps {
        let both = || scales.iter().zip(shifts);
        let out = |(scale, shift): (&f64, &f64)| Affine { mul: *scale as f32, add: (0.0 - shift * scale) as f32 };
        // The reciprocal of the rounded factor, so that a round trip changes latents by rounding alone.
        let back = |(scale, shift): (&f64, &f64)| Affine { mul: 1.0 / *scale as f32, add: *shift as f32 };
        LatentMaps { packing, out: both().map(out).collect(), back: both().map(back).collect() }
    }

    fn maps(&self, direction: Direction) -> &[Affine] {
        if direction == Direction::Encode { &self.out } else { &self.back }
    }

    /// The map of all channels, where [`LatentMaps::channels`] is `None`.
    pub fn map(&self, direction: Direction) -> Affine {
        self.maps(direction)[0]
    }

    /// The maps of the channels, where they differ.
    pub fn channels(&self, direction: Direction) -> Option<ChannelMaps<'_>> {
        let maps = self.maps(direction);
        (maps.len() > 1).then_some(ChannelMaps { side: self.packing, maps })
    }
}

/// The format that the setting `latent_format` (`asked`) or the checkpoint stands for.
fn format(asked: Option<&str>, model: &Model, path: &Path) -> Result<LatentFormat> {
    let formats = &model.latents[..];
    let fitting = || formats.iter().map(|format| format.name).collect::<Vec<_>>().join(", ");
    let found = match (asked, formats) {
        (Some(asked), _) => formats.iter().find(|format| format.name == asked).copied(),
        (None, [format]) => Some(*format),
        (None, _) => from_config(&path.with_file_name("config.json"), formats),
    };
    let unknown = || match (asked, formats) {
        (Some(asked), _) => {
            format!("latent_format: {asked} has other tensors than this checkpoint; it may be {}", fitting())
        }
        (None, []) => {
            "latents: model, but no published model has latents like this checkpoint's; set latents to raw".into()
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
fn from_config(path: &Path, formats: &[LatentFormat]) -> Option<LatentFormat> {
    let mut text = Vec::new();
    file::open_regular(path).ok()?.0?.take(MAX_CONFIG).read_to_end(&mut text).ok()?;
    let config: serde_json::Value = serde_json::from_slice(&text).ok()?;
    let is_autoencoder = config["_class_name"].as_str().is_some_and(|class| class.starts_with("AutoencoderKL"));
    let scale = config["scaling_factor"].as_f64().filter(|_| is_autoencoder)?;
    let scaling = LatentScaling::Scaled { scale, shift: config["shift_factor"].as_f64().unwrap_or(0.0) };
    let published = formats.iter().find(|format| format.scaling == scaling);
    Some(LatentFormat { name: published.map_or("", |format| format.name), scaling })
}
