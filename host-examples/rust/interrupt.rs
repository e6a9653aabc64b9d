//! Ctrl-C and the signals that end a process: stops what runs, lets everything clean up after itself, and sees to it
//! that all is over within a second.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Mutex, MutexGuard, Once};
use std::time::Duration;

use crate::api::{api, vvae};
use crate::{Result, say};

/// Of Ctrl-C, on every system.
const SIGINT: u8 = 2;

/// How long the orderly way out may take.
const PATIENCE: Duration = Duration::from_millis(600);

static REQUESTED: AtomicBool = AtomicBool::new(false);
static SIGNAL: AtomicU8 = AtomicU8::new(SIGINT);
/// What a run leaves, in words.
static LEFT: Mutex<&str> = Mutex::new("nothing was left behind");

/// What the handler has to know: handles to cancel, by number, and unfinished files to remove.
struct Watched {
    handles: Vec<usize>,
    drafts: Vec<PathBuf>,
}

fn watched() -> MutexGuard<'static, Watched> {
    static WATCHED: Mutex<Watched> = Mutex::new(Watched { handles: Vec::new(), drafts: Vec::new() });
    WATCHED.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

pub fn requested() -> bool {
    REQUESTED.load(Ordering::Relaxed)
}

/// What shells expect of a program that a signal ended.
pub fn exit_code() -> u8 {
    128 + SIGNAL.load(Ordering::Relaxed)
}

/// Says what an interrupted run leaves, if that is not nothing.
pub fn leaves(what: &'static str) {
    install();
    *LEFT.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = what;
}

/// The last words of a run that was interrupted.
pub fn tell() {
    let left = *LEFT.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    say::note(format_args!("vvae: interrupted; {left}"));
}

/// An error as soon as the user wants to stop.
pub fn check() -> Result<()> {
    if requested() { Err("interrupted".into()) } else { Ok(()) }
}

pub fn watch(handle: *mut vvae) {
    install();
    watched().handles.push(handle.addr());
}

pub fn unwatch(handle: *mut vvae) {
    watched().handles.retain(|known| *known != handle.addr());
}

pub fn watch_draft(path: PathBuf) {
    install();
    watched().drafts.push(path);
}

pub fn unwatch_draft(path: &PathBuf) {
    watched().drafts.retain(|known| known != path);
}

fn install() {
    static ONCE: Once = Once::new();
    // Without a handler the default one ends the command at once, which is safe too: nothing has its final name.
    ONCE.call_once(listen);
}

#[cfg(unix)]
fn listen() {
    use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
    let Ok(mut signals) = signal_hook::iterator::Signals::new([SIGINT, SIGTERM, SIGHUP]) else { return };
    std::thread::spawn(move || signals.forever().for_each(|signal| interrupt(signal as u8)));
}

#[cfg(not(unix))]
fn listen() {
    let _ = ctrlc::set_handler(|| interrupt(SIGINT));
}

/// Runs on a thread of its own.
fn interrupt(signal: u8) {
    SIGNAL.store(signal, Ordering::Relaxed);
    if REQUESTED.swap(true, Ordering::Relaxed) {
        leave();
    }
    if let Ok(api) = api() {
        for handle in watched().handles.iter() {
            // SAFETY: handles are numbers that are never used twice; one that was freed meanwhile is an error, no more.
            unsafe { (api.vvae_cancel)(std::ptr::without_provenance_mut(*handle)) };
        }
    }
    std::thread::spawn(|| {
        std::thread::sleep(PATIENCE);
        leave();
    });
}

/// The way out when something blocks: a pipe that nobody writes to, a disk that does not answer.
fn leave() -> ! {
    for draft in watched().drafts.iter() {
        remove(draft);
    }
    tell();
    std::process::exit(i32::from(exit_code()))
}

/// A file or a folder; one that is not there is fine.
pub fn remove(path: &Path) {
    let _ = if path.is_dir() { std::fs::remove_dir_all(path) } else { std::fs::remove_file(path) };
}
