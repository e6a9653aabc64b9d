//! The outcome of a call.

use std::ffi::{CStr, c_char};

use video_vae::capi::*;

use super::api;

/// A failed call.
#[derive(Debug, Clone, PartialEq)]
pub struct Failure {
    pub status: i32,
    pub text: String,
}

impl Failure {
    /// Asserts the status and words of the text.
    #[track_caller]
    pub fn says(&self, status: i32, words: &[&str]) {
        assert_eq!(self.status, status, "{}", self.text);
        for word in words {
            assert!(self.text.contains(word), "\"{word}\" is not in: {}", self.text);
        }
    }
}

/// The text of the last failure of `v`, or of the thread if `v` is null.
pub fn error_text(v: *mut vvae) -> String {
    let mut text = [0 as c_char; 4096];
    // SAFETY: the buffer has the given size.
    let len = unsafe { (api().vvae_error)(v, text.as_mut_ptr(), text.len() as u64) };
    // SAFETY: it always ends with a NUL.
    let text = unsafe { CStr::from_ptr(text.as_ptr()) }.to_str().expect("texts are UTF-8").to_owned();
    assert_eq!(len as usize, text.len(), "{text}");
    text
}

/// `Ok` with the status if there was no failure. `v` as in [`error_text`].
pub fn outcome(v: *mut vvae, status: i32) -> Result<i32, Failure> {
    if status >= 0 { Ok(status) } else { Err(Failure { status, text: error_text(v) }) }
}
