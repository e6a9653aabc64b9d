//! `vvae`: video to latents and back from the command line.
//!
//! A host like any other: it opens the shared library at run time and runs it through the C ABI alone, by `api` and
//! `vae`. Only what describes checkpoints and safetensors files is linked. Every command is a file under `commands`.

mod api;
mod checkpoint;
mod cli;
mod commands;
mod cublas;
mod download;
mod draft;
pub mod files;
mod gpu;
mod interrupt;
mod json;
mod memory;
mod models;
mod options;
pub mod picture;
mod pipeline;
mod progress;
mod random_weights;
mod range;
mod report;
mod say;
mod spool;
mod tensor;
mod units;
mod vae;
mod warnings;
mod whole;

use std::process::ExitCode;

/// Every failure is one sentence that says what to do.
type Result<T> = std::result::Result<T, String>;

// Pixels and latents go to files as they lie in memory, and every format here is little-endian.
const _: () = assert!(cfg!(target_endian = "little"), "this command is written for little-endian machines");

/// The command, from the words that it was started with to the code it ends with.
pub fn main() -> ExitCode {
    match cli::run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) if interrupt::requested() => {
            interrupt::tell();
            ExitCode::from(interrupt::exit_code())
        }
        Err(_) if say::unheard() => ExitCode::from(say::UNHEARD_EXIT_CODE),
        Err(why) => {
            say::note(format_args!("vvae: {why}"));
            ExitCode::FAILURE
        }
    }
}
