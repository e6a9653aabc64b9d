//! Texts of the ABI: C strings in, copies into the host's buffer out, and each thread's last error.

use std::cell::RefCell;
use std::ffi::{CStr, c_char};

use crate::error::{Error, Result};

/// Reads a text of the host.
///
/// # Safety
/// `text` is null or points to a NUL-terminated string that lives as long as the result is used.
pub(super) unsafe fn read<'a>(argument: &str, text: *const c_char) -> Result<&'a str> {
    if text.is_null() {
        return Err(Error::Argument(format!("{argument} is null; it must point to a text")));
    }
    // SAFETY: not null, so the caller vouches for it.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_str().map_err(|_| {
        Error::Argument(format!("{argument}: \"{}\" is not UTF-8; every text must be", text.to_string_lossy()))
    })
}

/// Copies as much of a text as fits, always with a NUL, never half a character.
pub(super) fn copy(text: &str, to: &mut [u8]) {
    let Some(room) = to.len().checked_sub(1) else { return };
    let len = text.floor_char_boundary(room);
    for (to, from) in to.iter_mut().zip(&text.as_bytes()[..len]) {
        // A NUL within the text, as a hostile file may have, would hide the rest.
        *to = if *from == 0 { b'?' } else { *from };
    }
    to[len] = 0;
}

/// Copies a text into the host's buffer and returns the length of the whole text.
///
/// # Safety
/// `to` is null or points to `capacity` writable bytes.
pub(super) unsafe fn write(text: &str, to: *mut c_char, capacity: u64) -> u64 {
    if !to.is_null() {
        // A capacity that is too large does no harm: no more than the text and its NUL is written.
        let capacity = capacity.min(text.len() as u64 + 1) as usize;
        // SAFETY: the caller vouches for at least this many bytes.
        copy(text, unsafe { std::slice::from_raw_parts_mut(to.cast(), capacity) });
    }
    text.len() as u64
}

/// A text in an array of a struct.
pub(super) fn array<const N: usize>(text: &str) -> [c_char; N] {
    let mut bytes = [0u8; N];
    copy(text, &mut bytes);
    bytes.map(|b| b as c_char)
}

const LAST_ERROR_BYTES: usize = 2048;

thread_local! {
    /// Plain bytes, not a `String`: no destructor runs when a thread of the host ends.
    static LAST_ERROR: RefCell<[u8; LAST_ERROR_BYTES]> = const { RefCell::new([0; LAST_ERROR_BYTES]) };
}

/// Stores a failure for the calling thread.
pub(super) fn remember(text: &str) {
    LAST_ERROR.with_borrow_mut(|last| copy(text, last));
}

/// The calling thread's last failure; empty if there was none.
pub(super) fn last_error() -> String {
    LAST_ERROR.with_borrow(|last| {
        let text = CStr::from_bytes_until_nul(last).unwrap_or_default();
        text.to_string_lossy().into_owned()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_nul_within_a_text_is_replaced() {
        let mut buffer = [b'#'; 5];
        copy("a\0c", &mut buffer);
        assert_eq!(&buffer, b"a?c\0#");
    }

    #[test]
    fn a_long_error_is_cut_between_characters() {
        remember(&"\u{20ac}".repeat(1000));
        assert_eq!(last_error().chars().count(), (LAST_ERROR_BYTES - 1) / 3);
    }
}
