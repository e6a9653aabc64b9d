//! `vvae plan`: what a job would take, before anything runs.

use std::path::{Path, PathBuf};

use clap::ArgGroup;
use serde_json::{Value, json};

use video_vae::internals::model::families::seedvr2::Sizes;

use super::info;
use crate::api::fixed_text;
use crate::draft::Draft;
use crate::json::JsonOptions;
use crate::options::{DEVICE_LIKE, ModelOptions};
use crate::say::say;
use crate::tensor::{Dtype, FrameKind};
use crate::vae::Vae;
use crate::{Result, picture, random_weights, units, whole};

const EXAMPLES: &str = "Examples:
  vvae plan --decode 121x1080x1920 --device-like rtx4090 --limit 16GiB
  vvae plan --decode 121x1080x1920 --device cuda:0 --limit 6GiB --picture plan.svg
  vvae plan --encode 121x720x1280 --decode 121x720x1280 --weights ema_vae_fp16.safetensors
";

/// Memory and cuts of a job, before it runs.
///
/// Says how `vvae encode` or `vvae decode` would run a video of this size within a limit, and how much memory that
/// takes. A limit that is accepted here is accepted there. Sizes are those of the video in both directions. Without
/// --weights and $VIDEO_VAE_WEIGHTS the plan is for the sizes of the published checkpoint, which need not be there.
///
/// The plan is for the device of --device, as `vvae devices` names them. --device-like plans for a card that is not
/// here; no such plan was compared with a run, but for those of the H200.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES, group(ArgGroup::new("job").required(true).multiple(true).args(["encode", "decode"])))]
pub struct Plan {
    /// Plan an encode of a video of this size.
    #[arg(long, value_name = "TxHxW", value_parser = size)]
    encode: Option<[u64; 3]>,
    /// Plan a decode to a video of this size.
    #[arg(long, value_name = "TxHxW", value_parser = size)]
    decode: Option<[u64; 3]>,
    /// Plan for a card that need not be here, by its published rates: rtx3060, rtx4070, rtx4090, rtx5090, a100 or h200.
    #[arg(long, value_name = "CARD", conflicts_with_all = ["device", "trace"])]
    device_like: Option<String>,
    /// Draw it: what lies in memory, copies and limit over the estimated time.
    #[arg(long, value_name = "FILE.svg")]
    picture: Option<PathBuf>,
    #[command(flatten)]
    json: JsonOptions,
    #[command(flatten)]
    model: ModelOptions,
}

fn size(text: &str) -> Result<[u64; 3]> {
    units::sizes(text, "121x1080x1920")
}

impl Plan {
    pub fn run(self) -> Result<()> {
        let (model, json) = (&self.model, self.json.open()?);
        let picture = self.picture.as_deref().map(Draft::new).transpose()?;
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
        if self.device_like.is_some() && model.setting(DEVICE_LIKE).is_some() {
            return Err("--device-like and --set device_like name a card each; leave one out".into());
        }
        let vae = match &self.device_like {
            Some(card) => model.open_like(&path, card)?,
            None => model.open(&path)?,
        };
        let like = self.device_like.as_deref().or(model.setting(DEVICE_LIKE)).filter(|card| *card != "none");
        let place = place(&vae, like)?;
        let jobs = [("encode", self.encode), ("decode", self.decode)];
        let (mut devices, mut results) = (Vec::new(), Vec::new());
        for (node, size) in jobs.into_iter().filter_map(|(node, size)| Some((node, size?))) {
            let job = Job { node, size, place: &place };
            say!("\n{}", job.describe(&vae).map_err(|why| format!("planned for {place}: {why}"))?)?;
            results.push(job.json(&vae, like, &path)?);
            if self.picture.is_some() {
                devices.extend(job.timelines(&vae)?);
            }
        }
        vae.end_trace()?;
        json.write("plan", results)?;
        let (Some(draft), Some(path)) = (picture, &self.picture) else { return Ok(()) };
        draft.write(&picture::plan(&json!({ "devices": devices }))?)?;
        say!("\n{}: the plan's picture, for a browser", path.display())
    }
}

/// The devices that are planned for, for people.
fn place(vae: &Vae, like: Option<&str>) -> Result<String> {
    if let Some(card) = like {
        return Ok(card.to_owned());
    }
    let named = |id: String| Ok(format!("{id} ({})", info::device_name(&id)?));
    let devices: Result<Vec<String>> = vae.devices()?.iter().map(|device| named(fixed_text(&device.id))).collect();
    Ok(devices?.join(", "))
}

/// How the command would run a video of this many frames, rows and columns, in words.
pub fn describe(vae: &Vae, node: &str, size: [u64; 3]) -> Result<String> {
    Job { node, size, place: &place(vae, None)? }.describe(vae)
}

/// A node on a video of this many frames, rows and columns.
struct Job<'a> {
    node: &'a str,
    size: [u64; 3],
    place: &'a str,
}

impl Job<'_> {
    fn describe(&self, vae: &Vae) -> Result<String> {
        let ((kind, inputs), [frames, height, width]) = (input(vae, self.node, self.size), self.size);
        let (node, place, frames) = (self.node, self.place, units::counted(frames, "frame"));
        let planned = whole::plan(vae, node, kind, Some(inputs))?;
        let manner = if planned.whole { "as a whole" } else { "as a stream, at constant memory" };
        let text = planned.text.trim_end();
        let mut text = format!("{node} {frames} of {width}x{height} on {place}, {manner}\n{text}");
        // The plan of a stream knows no length, and so no time.
        if let (false, Ok((info, _))) = (planned.whole, vae.plan(node, kind.shape(inputs))) {
            text += &format!("\ntime: about {} for {frames}", units::seconds(info.seconds));
        }
        Ok(text)
    }

    /// The figures of a plan. A stream takes its memory and slices from the stream's plan, its time from the clip's.
    fn json(&self, vae: &Vae, like: Option<&str>, weights: &Path) -> Result<Value> {
        let ((kind, inputs), [frames, height, width]) = (input(vae, self.node, self.size), self.size);
        let (node, planned) = (self.node, whole::plan(vae, self.node, kind, Some(inputs))?);
        let (info, text) = vae.plan(node, kind.shape(if planned.whole { inputs } else { 0 }))?;
        let seconds = vae.plan(node, kind.shape(inputs)).map_or(info.seconds, |(info, _)| info.seconds);
        let own = || Ok(vae.devices()?.iter().map(|device| fixed_text(&device.id)).collect::<Vec<_>>());
        let devices: Result<Vec<String>> = like.map_or_else(own, |card| Ok(vec![card.to_owned()]));
        Ok(json!({
            "node": node, "checkpoint": weights.display().to_string(), "devices": devices?, "estimated_for": like,
            "frames": frames, "height": height, "width": width, "whole": planned.whole, "exact": info.exact == 1,
            "device_bytes": info.device_bytes, "host_bytes": info.host_bytes, "weight_bytes": info.weight_bytes,
            "workspace_bytes": info.workspace_bytes, "offloaded_frame_bytes": info.offloaded_frame_bytes,
            "offloaded_weight_bytes": info.offloaded_weight_bytes,
            "moved_bytes_per_frame": info.moved_bytes_per_frame, "slice_frames": info.slice_frames,
            "chunk_frames": &info.chunk_frames[..info.chunk_count.clamp(0, 8) as usize],
            "tiles": [info.tile_rows, info.tile_columns], "seconds": seconds, "text": text,
        }))
    }

    fn timelines(&self, vae: &Vae) -> Result<Vec<Value>> {
        let (kind, inputs) = input(vae, self.node, self.size);
        let is_whole = whole::plan(vae, self.node, kind, Some(inputs))?.whole;
        whole::timelines(vae, self.node, kind, is_whole, Some(self.size[0]))
    }
}

/// What goes into a node for a video of this size, and how many frames of it.
fn input(vae: &Vae, node: &str, [frames, height, width]: [u64; 3]) -> (FrameKind, u64) {
    let (rows, columns) = (height as usize, width as usize);
    match node {
        "encode" => {
            let channels = vae.model().pixel_channels as usize;
            (FrameKind::pixels(Dtype::U8, columns, rows).with_channels(channels), frames)
        }
        _ => (FrameKind::latent(Dtype::F32, vae.latent_size(columns, rows)), vae.latent_frames(frames)),
    }
}
