//! The commands.

mod bench;
mod check;
mod compare;
mod decode;
mod demo;
mod encode;
mod get;
mod info;
mod make_weights;
mod plan;
mod roundtrip;

use std::path::Path;
use std::sync::atomic::Ordering;

use crate::api::fixed_text;
use crate::say::{self, say};
use crate::{Result, files, units};

#[derive(Debug, clap::Subcommand)]
#[command(rename_all = "kebab-case")]
pub enum Command {
    Demo(demo::Demo),
    Get(get::Get),
    Info(info::Info),
    Devices(info::Devices),
    Plan(plan::Plan),
    Encode(encode::Encode),
    Decode(decode::Decode),
    Roundtrip(roundtrip::Roundtrip),
    MakeWeights(make_weights::MakeWeights),
    Compare(compare::Compare),
    Check(check::Check),
    Bench(bench::Bench),
    /// Prints what a shell needs to complete these commands and options.
    #[command(after_help = "Examples:\n  vvae completions bash > ~/.local/share/bash-completion/completions/vvae\n")]
    Completions {
        shell: clap_complete::Shell,
    },
}

impl Command {
    /// `completions` prints those of a shell.
    pub fn run(self, completions: impl FnOnce(clap_complete::Shell) -> Result<()>) -> Result<()> {
        match self {
            Command::Demo(demo) => demo.run(),
            Command::Get(get) => get.run(),
            Command::Info(info) => info.run(),
            Command::Devices(devices) => devices.run(),
            Command::Plan(plan) => plan.run(),
            Command::Encode(encode) => encode.run(),
            Command::Decode(decode) => decode.run(),
            Command::Roundtrip(roundtrip) => roundtrip.run(),
            Command::MakeWeights(make) => make.run(),
            Command::Compare(compare) => compare.run(),
            Command::Check(check) => check.run(),
            Command::Bench(bench) => bench.run(),
            // The whole command line has to be known for it.
            Command::Completions { shell } => completions(shell),
        }
    }
}

/// What became of the clip, after the report of success.
fn tell(notes: Vec<String>) {
    notes.iter().for_each(|note| say::warn(format_args!("{note}")));
}

/// The last line of a run: what it wrote, how fast, and what it took.
fn report(path: &Path, what: &str, frames: u64, seconds: f64, vae: &crate::vae::Vae) -> Result<()> {
    vae.end_trace()?;
    if say::QUIET.load(Ordering::Relaxed) {
        return Ok(());
    }
    let rate = frames as f64 / seconds;
    let model = units::bytes(vae.memory()?.peak);
    let process = units::resident_peak().map(|bytes| format!(", the process {}", units::bytes(bytes)));
    let process = process.unwrap_or_default();
    let last = vae.last_run()?;
    let inexact = match (last.exact, last.tile_rows, last.tile_columns) {
        (1, ..) => String::new(),
        (_, 1, 1) => "; with caches in 8 bits, which is not exact".into(),
        (_, rows, columns) => format!("; in {rows} x {columns} tiles, which is not exact"),
    };
    let (path_is_stdout, path) = (files::is_stdio(path), path.display());
    let mut lines = vec![format!(
        "{path}: {what}; {seconds:.1} s, {rate:.1} frames/s; the model took {model} at most{process}{inexact}"
    )];
    let devices = vae.devices()?;
    for device in devices.iter().filter(|_| devices.len() > 1) {
        let (id, peak) = (fixed_text(&device.id), units::bytes(device.peak));
        let frames = units::counted(device.frames.max(0) as u64, "frame");
        lines.push(format!("  {id}: {frames} of the last part in {:.1} s, {peak} at most", device.measured_seconds));
    }
    // Standard output may be the video.
    match path_is_stdout {
        true => lines.iter().for_each(|line| say::note(format_args!("{line}"))),
        false => lines.iter().try_for_each(|line| say!("{line}"))?,
    }
    Ok(())
}
