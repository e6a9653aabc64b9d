//! The commands.

mod bench;
mod decode;
mod demo;
mod encode;
mod info;
mod make_weights;
mod plan;
mod roundtrip;

use crate::args::{Args, Takes};
use crate::say::{self, say};
use crate::{Result, units};

/// One command: how it is called and what it does.
pub struct Command {
    name: &'static str,
    /// In a few words, for the overview.
    summary: &'static str,
    /// What follows the name.
    usage: &'static str,
    /// What it does, its own options, and examples, in this order; shared parts of the help come between.
    about: &'static str,
    help: &'static [&'static str],
    examples: &'static str,
    takes: Takes,
    run: fn(&Args) -> Result<()>,
}

const COMMANDS: [&Command; 8] = [
    &demo::COMMAND,
    &info::COMMAND,
    &plan::COMMAND,
    &encode::COMMAND,
    &decode::COMMAND,
    &roundtrip::COMMAND,
    &make_weights::COMMAND,
    &bench::COMMAND,
];

pub fn find(name: &str) -> Result<&'static Command> {
    COMMANDS.into_iter().find(|command| command.name == name).ok_or_else(|| {
        let names = COMMANDS.map(|command| command.name).join(", ");
        format!("there is no command \"{name}\"; the commands are {names}, and `vvae --help` tells about them")
    })
}

impl Command {
    pub fn start(&self, words: Vec<String>) -> Result<()> {
        if words.iter().any(|word| word == "--help" || word == "-h") {
            return say::page(&self.page());
        }
        (self.run)(&Args::parse(self.name, &self.takes, words)?)
    }

    fn page(&self) -> String {
        let mut page = format!("vvae {} {}\n\n{}", self.name, self.usage, self.about);
        for part in self.help {
            page += "\n";
            page += part;
        }
        page += "\nExamples:\n";
        page += self.examples;
        page
    }
}

/// The help of the command as a whole.
pub fn overview() -> String {
    let mut page = String::from(
        "vvae: video to latents and back, with the SeedVR2 video autoencoder\n\nUsage: vvae COMMAND [WORDS] [OPTIONS]\n\n",
    );
    for command in COMMANDS {
        page += &format!("  {:<13}{}\n", command.name, command.summary);
    }
    page += "
  vvae COMMAND --help   everything about a command, with examples
  vvae --version        of the library, and where it was found

Start with `vvae demo`, which needs nothing. For real work get the published checkpoint, ema_vae_fp16.safetensors, and
name it with --weights FILE or in the environment:

  export VIDEO_VAE_WEIGHTS=~/models/ema_vae_fp16.safetensors
  vvae info $VIDEO_VAE_WEIGHTS
  vvae roundtrip holiday.mp4 holiday-through-the-vae.mp4

Environment:
  VIDEO_VAE_WEIGHTS   the checkpoint, unless --weights names one
  VIDEO_VAE_LIBRARY   the library, if it does not lie near this command
  FFMPEG              the ffmpeg program, if it is not found by that name
";
    page
}

/// The two files that a command goes between.
fn two_paths(args: &Args) -> (&std::path::Path, &std::path::Path) {
    let path = |index| std::path::Path::new(args.word(index).expect("required words are there"));
    (path(0), path(1))
}

/// The last line of a run: what it wrote, how fast, and what it took.
fn report(path: &std::path::Path, what: &str, frames: u64, seconds: f64, vae: &crate::vae::Vae) -> Result<()> {
    let rate = frames as f64 / seconds;
    let model = units::bytes(vae.memory()?.peak);
    let process = units::resident_peak().map(|bytes| format!(", the process {}", units::bytes(bytes)));
    let process = process.unwrap_or_default();
    let last = vae.last_run()?;
    let tiles = match last.exact {
        1 => String::new(),
        _ => format!("; in {} x {} tiles, which is not exact", last.tile_rows, last.tile_columns),
    };
    let path = path.display();
    say!("{path}: {what}; {seconds:.1} s, {rate:.1} frames/s; the model took {model} at most{process}{tiles}")?;
    let devices = vae.devices()?;
    for device in devices.iter().filter(|_| devices.len() > 1) {
        let (id, peak) = (info::fixed_text(&device.id), units::bytes(device.peak));
        say!("  {id}: {} frames of the last part in {:.1} s, {peak} at most", device.frames, device.measured_seconds)?;
    }
    Ok(())
}
