//! What several commands take: a model and its settings, and types of stored numbers.

use std::path::{Path, PathBuf};

use clap::ValueEnum;

use crate::tensor::Dtype;
use crate::vae::{TRACE, Vae};
use crate::{Result, models};

const WEIGHTS: &str = "VIDEO_VAE_WEIGHTS";
const ANY_DEVICE: &str = "auto";
/// The parameter for plans of a card that is not here.
pub const DEVICE_LIKE: &str = "device_like";

#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Model")]
pub struct ModelOptions {
    /// The checkpoint: a file, a name of `vvae get`, or the word demo for the small one of `vvae demo`; without it
    /// that of $VIDEO_VAE_WEIGHTS.
    #[arg(long, value_name = "FILE")]
    pub weights: Option<PathBuf>,
    /// cpu, cuda:0, ... as `vvae info` lists them, a list such as cuda:0,cuda:1, or cuda:*.
    #[arg(long, value_name = "NAME", default_value = ANY_DEVICE)]
    pub device: String,
    /// Memory to keep to, such as 6GiB or 2.7GiB; default: what is free.
    #[arg(long, value_name = "BYTES", allow_negative_numbers = true)]
    pub limit: Option<String>,
    /// Write the times of every operation and copy, for chrome://tracing and Perfetto.
    #[arg(long, value_name = "FILE.json")]
    pub trace: Option<String>,
    /// Any parameter that `vvae info` lists; may be given more than once.
    #[arg(long, value_name = "KEY=VALUE", value_parser = key_and_value)]
    pub set: Vec<(String, String)>,
}

pub fn key_and_value(text: &str) -> Result<(String, String)> {
    let pair = text.split_once('=').map(|(key, value)| (key.to_owned(), value.to_owned()));
    pair.ok_or_else(|| "write it as KEY=VALUE".into())
}

impl ModelOptions {
    /// The checkpoint that was named.
    pub fn named_weights(&self) -> Option<Result<PathBuf>> {
        let variable = || models::set_variable(WEIGHTS).map(PathBuf::from);
        self.weights.clone().or_else(variable).map(|named| models::resolve(&named))
    }

    /// The checkpoint that was named. Results of another one would be worthless, so none is assumed.
    pub fn weights(&self) -> Result<PathBuf> {
        self.named_weights().unwrap_or_else(|| {
            Err("name a checkpoint: --weights FILE, or export VIDEO_VAE_WEIGHTS=FILE; `vvae get seedvr2` downloads one, \
                 which is then --weights seedvr2; --weights demo takes the small one of the demo, which is a toy"
                .into())
        })
    }

    /// Whether words of the command chose any of this; the environment alone does not count.
    pub fn are_given(&self) -> bool {
        self.weights.is_some() || self.device != ANY_DEVICE || self.settings().next().is_some()
    }

    /// The precisions to show: on the CPU the exact one and the fast one, unless one is set.
    pub fn precisions(&self, on_cpu: bool) -> &'static [Option<&'static str>] {
        let chosen = self.set.iter().any(|(key, _)| key == "precision");
        if on_cpu && !chosen { &[Some("fp32"), Some("bf16")] } else { &[None] }
    }

    pub fn open(&self, weights: &Path) -> Result<Vae> {
        self.configured(Vae::open(weights, &self.device)?)
    }

    /// A handle that plans for a card that is not here. Settings that only a card has come after it.
    pub fn open_like(&self, weights: &Path, card: &str) -> Result<Vae> {
        let vae = Vae::open(weights, "cpu")?;
        vae.configure(DEVICE_LIKE, card)?;
        self.configured(vae)
    }

    fn configured(&self, vae: Vae) -> Result<Vae> {
        self.settings().try_for_each(|(key, value)| vae.configure(key, value))?;
        Ok(vae)
    }

    /// Keys and values of --set, after --limit and --trace as the parameters they are.
    pub fn settings(&self) -> impl Iterator<Item = (&str, &str)> {
        let limit = self.limit.as_deref().map(|limit| ("memory_limit", limit));
        let trace = self.trace.as_deref().map(|trace| (TRACE, trace));
        limit.into_iter().chain(trace).chain(self.set.iter().map(|(key, value)| (key.as_str(), value.as_str())))
    }

    /// The value that a parameter was set to last.
    pub fn setting(&self, key: &str) -> Option<&str> {
        self.settings().filter(|(known, _)| *known == key).last().map(|(_, value)| value)
    }
}

/// Floating-point types of stored latents and checkpoints.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum Float {
    F16,
    Bf16,
    F32,
}

impl Float {
    pub fn dtype(self) -> Dtype {
        match self {
            Float::F16 => Dtype::F16,
            Float::Bf16 => Dtype::Bf16,
            Float::F32 => Dtype::F32,
        }
    }
}
