//! What several commands take: a model and its settings, and how video files are read and written.

use std::path::{Path, PathBuf};

use crate::Result;
use crate::args::Args;
use crate::files::Matrix;
use crate::units::{self, Rate};
use crate::vae::Vae;

pub const MODEL: &[&str] = &["weights", "device", "limit", "set"];
pub const MODEL_HELP: &str = "\
Model:
  --weights FILE      the checkpoint; default: $VIDEO_VAE_WEIGHTS, else the demo's own
  --device NAME       cpu, cuda:0, ... as `vvae info` lists them, a list such as cuda:0,cuda:1, or cuda:*; default: auto
  --limit BYTES       memory to keep to, such as 6GiB; default: what is free
  --set KEY=VALUE     any parameter that `vvae info` lists; may be given more than once
";

pub const VIDEO: &[&str] = &["size", "fps", "bits", "matrix", "y4m"];
pub const VIDEO_HELP: &str = "\
Video:
  --size WxH          size of a raw input
  --fps RATE          frames a second, such as 24 or 24000/1001; default: what the input says, else 24
  --bits 8|16         depth of written PNGs, raw files, y4m (16: 10 bits) and mkv; default: 8
  --matrix 601|709    colour matrix of y4m; default: 709 from 1280 wide or 577 high on, else 601
  --y4m LAYOUT        layout of a written y4m: 444, 422, 420, 420mpeg2, 444p10, 422p10, 420p10, ...
";

/// The checkpoint that the project ships: in the source tree, in an installed prefix, beside the command in a wheel.
pub const DEMO_WEIGHTS: &str = "host-examples/assets/demo.safetensors";
const INSTALLED_WEIGHTS: [&str; 2] = ["share/video-vae/demo.safetensors", "demo.safetensors"];

#[derive(Debug, Clone)]
pub struct VideoOptions {
    pub size: Option<[u64; 2]>,
    pub rate: Option<Rate>,
    pub bits: u32,
    pub matrix: Option<Matrix>,
    pub y4m: Option<String>,
}

impl VideoOptions {
    pub fn read(args: &Args) -> Result<VideoOptions> {
        let size = args.option("size").map(|text| units::sizes(text, "640x480")).transpose();
        let bits = args.choice("bits", &["8", "16"])?;
        let matrix = match args.choice("matrix", &["usual", "601", "709"])? {
            "601" => Some(Matrix::Bt601),
            "709" => Some(Matrix::Bt709),
            _ => None,
        };
        Ok(VideoOptions {
            size: size.map_err(|why| format!("--size: {why}"))?,
            rate: args.option("fps").map(Rate::parse).transpose().map_err(|why| format!("--fps: {why}"))?,
            bits: if bits == "16" { 16 } else { 8 },
            matrix,
            y4m: args.option("y4m").map(str::to_owned),
        })
    }
}

/// The checkpoint that was asked for, else the one of the environment.
pub fn named_weights(args: &Args) -> Option<PathBuf> {
    args.option("weights").map(PathBuf::from).or_else(|| std::env::var_os("VIDEO_VAE_WEIGHTS").map(PathBuf::from))
}

/// As `named_weights`, else the demo's: around the executable, or in the source tree that this was built from.
pub fn weights(args: &Args) -> Result<PathBuf> {
    if let Some(path) = named_weights(args) {
        return Ok(path);
    }
    let executable = std::env::current_exe().unwrap_or_default();
    let folders = || executable.ancestors().skip(1);
    let installed = folders().take(2).flat_map(|folder| INSTALLED_WEIGHTS.map(|name| folder.join(name)));
    let sources =
        folders().chain([Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))]).map(|root| root.join(DEMO_WEIGHTS));
    installed.chain(sources).find(|path| path.is_file()).ok_or_else(|| {
        format!(
            "there is no checkpoint: {DEMO_WEIGHTS} is not here, so pass one with --weights FILE (`vvae make-weights` \
                 makes a random one)"
        )
    })
}

/// Opens the model that the options ask for, with its settings.
pub fn open_vae(args: &Args) -> Result<Vae> {
    open_vae_with(args, &weights(args)?)
}

pub fn open_vae_with(args: &Args, weights: &Path) -> Result<Vae> {
    let vae = Vae::open(weights, args.option("device").unwrap_or("auto"))?;
    for (key, value) in settings(args)? {
        vae.configure(key, value)?;
    }
    Ok(vae)
}

/// Keys and values of --set, and --limit as the parameter it is.
pub fn settings(args: &Args) -> Result<Vec<(&str, &str)>> {
    let pair = |text| str::split_once(text, '=').ok_or_else(|| format!("--set: write \"{text}\" as KEY=VALUE"));
    let set: Result<Vec<_>> = args.all("set").map(pair).collect();
    Ok(args.option("limit").map(|limit| ("memory_limit", limit)).into_iter().chain(set?).collect())
}
