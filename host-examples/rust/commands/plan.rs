//! `vvae plan`: what a job would take, before anything runs.

use clap::ArgGroup;

use crate::checkpoint::Config;
use crate::options::ModelOptions;
use crate::say::say;
use crate::tensor::{Dtype, FrameKind};
use crate::vae::Vae;
use crate::{Result, random_weights, units};

const EXAMPLES: &str = "Examples:
  vvae plan --decode 121x1080x1920 --limit 6GiB
  vvae plan --encode 121x720x1280 --decode 121x720x1280 --weights ema_vae_fp16.safetensors
";

/// Memory and cuts of a job, before it runs.
///
/// Says how a job would be cut to keep to a limit, and how much memory it would take, which is what it then takes. Sizes are
/// those of the video in both directions. Without --weights and $VIDEO_VAE_WEIGHTS the plan is for the sizes of the
/// published checkpoint, which need not be there.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES, group(ArgGroup::new("job").required(true).multiple(true).args(["encode", "decode"])))]
pub struct Plan {
    /// Plan an encode of a video of this size.
    #[arg(long, value_name = "TxHxW", value_parser = size)]
    encode: Option<[u64; 3]>,
    /// Plan a decode to a video of this size.
    #[arg(long, value_name = "TxHxW", value_parser = size)]
    decode: Option<[u64; 3]>,
    #[command(flatten)]
    model: ModelOptions,
}

fn size(text: &str) -> Result<[u64; 3]> {
    units::sizes(text, "121x1080x1920")
}

impl Plan {
    pub fn run(self) -> Result<()> {
        let model = &self.model;
        let (blank, path);
        match model.named_weights() {
            Some(named) => {
                let named = named?;
                say!("for the checkpoint {}", named.display())?;
                path = named;
            }
            None => {
                blank = random_weights::blank(&Config::published(), Dtype::F16)?;
                say!("for the published checkpoint's sizes")?;
                path = blank.path.clone();
            }
        }
        let vae = model.open(&path)?;
        let jobs = [("encode", self.encode), ("decode", self.decode)];
        for (node, size) in jobs.into_iter().filter_map(|(node, size)| Some((node, size?))) {
            say!("\n{}", describe(&vae, node, size)?)?;
        }
        Ok(())
    }
}

/// The plan of a video of this many frames, rows and columns, in words.
pub fn describe(vae: &Vae, node: &str, [frames, height, width]: [u64; 3]) -> Result<String> {
    let (height, width) = (height as usize, width as usize);
    let shape = if node == "encode" {
        FrameKind::pixels(Dtype::U8, width, height).shape(frames)
    } else {
        FrameKind::latent(Dtype::F32, vae.latent_size(width, height)).shape(vae.latent_frames(frames))
    };
    Ok(vae.plan(node, shape)?.1.trim_end().to_owned())
}
