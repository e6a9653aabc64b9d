//! `vvae make-weights`: a random checkpoint of the real layout.

use std::path::PathBuf;

use video_vae::internals::model::families::seedvr2::Sizes;

use crate::options::Float;
use crate::say::say;
use crate::{Result, checkpoint, random_weights, units};

const EXAMPLES: &str = "Examples:
  vvae make-weights random.safetensors
  vvae make-weights tiny.safetensors --channels 16,32,32,32 --groups 16 --dtype f32 --seed 7
";

/// A random checkpoint, for measuring and testing.
///
/// Writes a checkpoint with the names and shapes of the published one and random values, scaled so that activations
/// stay near unit size. It measures as the real one does, and shows nothing. The same options give the same file.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct MakeWeights {
    #[arg(value_name = "OUT.safetensors")]
    output: PathBuf,
    /// Of each level, from full resolution down.
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "128,256,512,512")]
    channels: Vec<u64>,
    /// Residual blocks of an encoder level.
    #[arg(long, value_name = "N", default_value_t = 2)]
    layers: u64,
    /// Channels of a latent.
    #[arg(long, value_name = "N", default_value_t = 16)]
    latent: u64,
    /// Groups of the norms.
    #[arg(long, value_name = "N", default_value_t = 32)]
    groups: u64,
    /// Changes of resolution that also change the frame rate.
    #[arg(long, value_name = "N", default_value_t = 2)]
    temporal: u64,
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// As published: f16.
    #[arg(long, default_value = "f16")]
    dtype: Float,
}

impl MakeWeights {
    pub fn run(self) -> Result<()> {
        let MakeWeights { output, channels, layers, latent, groups, temporal, seed, dtype } = self;
        let config = Sizes { channels, layers, latent, groups, temporal_levels: temporal };
        checkpoint::check(&config)?;
        let parameters = random_weights::write(&output, &config.model(), dtype.dtype(), seed)?;
        say!("{}: {} random parameters in {}", output.display(), units::grouped(parameters), dtype.dtype().name())
    }
}
