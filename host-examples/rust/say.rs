//! What a command says. Whoever reads its output may leave early, as `head` does: that ends the command, but it is no
//! failure to tell of. Names and texts of files may hold control characters, which are shown and not obeyed.

use std::borrow::Cow;
use std::fmt::Arguments;
use std::io::{ErrorKind, Write, stderr, stdout};
use std::sync::atomic::{AtomicBool, Ordering};

use crate::Result;

/// What shells expect of a program that nobody listens to any more: 128 + SIGPIPE.
pub const UNHEARD_EXIT_CODE: u8 = 141;

/// -q: no progress and no report.
pub static QUIET: AtomicBool = AtomicBool::new(false);

/// Standard output belongs to something else; text goes to standard error.
pub static TEXT_IS_ASIDE: AtomicBool = AtomicBool::new(false);

static UNHEARD: AtomicBool = AtomicBool::new(false);

/// Whether the reader has left.
pub fn unheard() -> bool {
    UNHEARD.load(Ordering::Relaxed)
}

/// `println!`, but a line that cannot be written is an error like any other instead of a panic.
macro_rules! say {
    ($($words:tt)*) => {
        $crate::say::line(format_args!($($words)*))
    };
}
pub(crate) use say;

pub fn line(words: Arguments) -> Result<()> {
    if QUIET.load(Ordering::Relaxed) {
        return Ok(());
    }
    if !TEXT_IS_ASIDE.load(Ordering::Relaxed) {
        return write(format_args!("{words}\n"));
    }
    words.to_string().lines().for_each(|line| note(format_args!("{line}")));
    Ok(())
}

/// What standard output is for.
pub fn output(text: &str) -> Result<()> {
    write(format_args!("{text}"))
}

/// A text that ends its own lines.
pub fn page(text: &str) -> Result<()> {
    write(format_args!("{text}"))
}

/// A line on standard error. Losing it is no reason to stop.
pub fn note(words: Arguments) {
    let _ = writeln!(stderr(), "{}", shown(&words.to_string(), &[]));
}

/// A line on standard error about something that is not as it should be, or not as it was, unless -q is given.
pub fn warn(words: Arguments) {
    if !QUIET.load(Ordering::Relaxed) {
        note(format_args!("vvae: {words}"));
    }
}

/// Control characters by their numbers, but for those that are `kept`.
fn shown<'a>(text: &'a str, kept: &[char]) -> Cow<'a, str> {
    let obeyed = |c: char| c.is_control() && !kept.contains(&c);
    if !text.contains(obeyed) {
        return Cow::Borrowed(text);
    }
    text.chars().map(|c| if obeyed(c) { c.escape_unicode().to_string() } else { c.to_string() }).collect()
}

/// Notes that an output could not be written because nobody reads it any more.
pub fn reader_left(why: &std::io::Error) {
    UNHEARD.fetch_or(why.kind() == ErrorKind::BrokenPipe, Ordering::Relaxed);
}

fn write(words: Arguments) -> Result<()> {
    let mut out = stdout().lock();
    let text = words.to_string();
    out.write_all(shown(&text, &['\n']).as_bytes()).and_then(|()| out.flush()).map_err(|why| {
        reader_left(&why);
        format!("standard output cannot be written: {why}")
    })
}
