//! The words that the command is started with, and errors in them as one line.

use std::sync::atomic::Ordering;

use clap::error::ErrorKind;
use clap::{CommandFactory, Parser};

use crate::commands::Command;
use crate::{Result, api, draft, say};

const AFTER_HELP: &str = "\
Start with `vvae demo`, which needs nothing. For real work get a published checkpoint, once, and name it:

  vvae get seedvr2
  vvae roundtrip holiday.mp4 trial.mp4 --weights seedvr2 --frames 10
  export VIDEO_VAE_WEIGHTS=seedvr2
  vvae roundtrip holiday.mp4 holiday-through-the-vae.mp4

`vvae COMMAND --help` has everything about a command, with examples.

Environment:
  VIDEO_VAE_WEIGHTS   the checkpoint, a file or a name, unless --weights names one
  VIDEO_VAE_LIBRARY   the library, if it does not lie near this command
  FFMPEG, FFPROBE     these programs, if they are not found by their names
";

/// Video and images to latents and back, with the autoencoders of diffusion models.
#[derive(Debug, Parser)]
#[command(name = "vvae", after_help = AFTER_HELP, disable_version_flag = true, disable_help_subcommand = true)]
#[command(arg_required_else_help = true, max_term_width = 120)]
pub struct Cli {
    /// Versions of the library and its ABI, and where the library was found.
    #[arg(short = 'V', long)]
    version: bool,
    /// No progress and no report; errors only.
    #[arg(short, long, global = true)]
    quiet: bool,
    /// Replace outputs that exist.
    #[arg(short = 'y', long, global = true)]
    overwrite: bool,
    #[command(subcommand)]
    command: Option<Command>,
}

/// Parses the words and does what they say.
pub fn run() -> Result<()> {
    // ffmpeg's users write -ss, which would be two options of one letter.
    let words = std::env::args_os().map(|word| if word == "-ss" { "--ss".into() } else { word });
    let words: Vec<std::ffi::OsString> = words.collect();
    match Cli::try_parse_from(&words) {
        Ok(Cli { version: true, .. }) => say::line(format_args!("{}", api::versions()?)),
        Ok(Cli { command: Some(command), quiet, overwrite, .. }) => {
            say::QUIET.store(quiet, Ordering::Relaxed);
            draft::OVERWRITE.store(overwrite, Ordering::Relaxed);
            command.run(completions)
        }
        Ok(_) => say::page(&Cli::command().render_help().to_string()),
        Err(why) => match why.kind() {
            ErrorKind::DisplayHelp => say::page(&why.to_string()),
            ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => say::page(&why.to_string()),
            _ => Err(one_line(&why.to_string(), &words)),
        },
    }
}

/// Writes the completions of a shell.
fn completions(shell: clap_complete::Shell) -> Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "vvae", &mut script);
    say::page(&String::from_utf8_lossy(&script))
}

/// What is wrong and what was meant, and where the help is, in place of the usage.
fn one_line(text: &str, words: &[std::ffi::OsString]) -> String {
    let told = text.split_once("\nUsage: ").map_or(text, |(told, _)| told);
    let told = told.split("\nFor more information").next().unwrap_or(told);
    let lines = told.lines().map(|line| line.trim().trim_start_matches("error: ")).filter(|line| !line.is_empty());
    let told = lines.map(|line| line.replacen("tip: ", "; ", 1)).collect::<Vec<_>>().join(" ").replace(" ; ", "; ");
    let cli = Cli::command();
    let command = words.iter().skip(1).find_map(|word| cli.find_subcommand(word));
    let command = command.map(|command| format!(" {}", command.get_name())).unwrap_or_default();
    format!("{told}; see: vvae{command} --help")
}
