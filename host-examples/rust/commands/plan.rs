//! `vvae plan`: what a job would take, before anything runs.

use std::path::PathBuf;

use clap::ArgGroup;
use serde_json::json;

use video_vae::internals::model::families::seedvr2::Sizes;

use crate::draft::Draft;
use crate::options::ModelOptions;
use crate::say::say;
use crate::tensor::{Dtype, FrameKind};
use crate::vae::Vae;
use crate::{Result, picture, random_weights, units, whole};

const EXAMPLES: &str = "Examples:
  vvae plan --decode 121x1080x1920 --limit 6GiB
  vvae plan --decode 121x1080x1920 --limit 6GiB --picture plan.svg
  vvae plan --encode 121x720x1280 --decode 121x720x1280 --weights ema_vae_fp16.safetensors
";

/// Memory and cuts of a job, before it runs.
///
/// Says how `vvae encode` or `vvae decode` would run a video of this size within a limit, and how much memory that
/// takes. A limit that is accepted here is accepted there. Sizes are those of the video in both directions. Without
/// --weights and $VIDEO_VAE_WEIGHTS the plan is for the sizes of the published checkpoint, which need not be there.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES, group(ArgGroup::new("job").required(true).multiple(true).args(["encode", "decode"])))]
pub struct Plan {
    /// Plan an encode of a video of this size.
    #[arg(long, value_name = "TxHxW", value_parser = size)]
    encode: Option<[u64; 3]>,
    /// Plan a decode to a video of this size.
    #[arg(long, value_name = "TxHxW", value_parser = size)]
    decode: Option<[u64; 3]>,
    /// Draw it: what lies in memory, copies and limit over the estimated time.
    #[arg(long, value_name = "FILE.svg")]
    picture: Option<PathBuf>,
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
                blank = random_weights::blank(&Sizes::published().model(), Dtype::F16)?;
                say!("for the published checkpoint's sizes")?;
                path = blank.path.clone();
            }
        }
        let vae = model.open(&path)?;
        let jobs = [("encode", self.encode), ("decode", self.decode)];
        let mut devices = Vec::new();
        for (node, size) in jobs.into_iter().filter_map(|(node, size)| Some((node, size?))) {
            say!("\n{}", describe(&vae, node, size)?)?;
            if self.picture.is_some() {
                let (kind, inputs) = input(&vae, node, size);
                let frames = if whole::plan(&vae, node, kind, Some(inputs))?.whole { inputs } else { 0 };
                devices
                    .extend(vae.timeline(node, kind.shape(frames))?["devices"].as_array().cloned().unwrap_or_default());
            }
        }
        let Some(path) = &self.picture else { return Ok(()) };
        Draft::new(path)?.write(&picture::plan(&json!({ "devices": devices }))?)?;
        say!("\n{}: the plan's picture, for a browser", path.display())
    }
}

/// What goes into a node for a video of this size, and how many frames of it.
fn input(vae: &Vae, node: &str, [frames, height, width]: [u64; 3]) -> (FrameKind, u64) {
    let (rows, columns) = (height as usize, width as usize);
    match node {
        "encode" => (FrameKind::pixels(Dtype::U8, columns, rows), frames),
        _ => (FrameKind::latent(Dtype::F32, vae.latent_size(columns, rows)), vae.latent_frames(frames)),
    }
}

/// How the command would run a video of this many frames, rows and columns, in words.
pub fn describe(vae: &Vae, node: &str, size: [u64; 3]) -> Result<String> {
    let ((kind, inputs), [frames, height, width]) = (input(vae, node, size), size);
    let planned = whole::plan(vae, node, kind, Some(inputs))?;
    let manner = if planned.whole { "as a whole" } else { "as a stream, at constant memory" };
    let frames = units::counted(frames, "frame");
    let mut text = format!("{node} {frames} of {width}x{height}, {manner}\n{}", planned.text.trim_end());
    // The plan of a stream knows no length, and so no time.
    if let (false, Ok((info, _))) = (planned.whole, vae.plan(node, kind.shape(inputs))) {
        text += &format!("\ntime: about {:.1} s for {frames}", info.seconds);
    }
    Ok(text)
}
