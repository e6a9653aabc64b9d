//! A stream of the C ABI.

use std::ptr::null;

use video_vae::capi::*;

use super::{Failure, Vae, api, outcome};

/// A stream that closes itself.
pub struct Stream<'a> {
    pub(super) vae: &'a Vae,
    pub s: *mut vvae_stream,
}

impl Stream<'_> {
    /// Status and number of frames taken; `None` ends the clip.
    pub fn push(&self, frames: Option<&vvae_tensor>) -> Result<(i32, i64), Failure> {
        let mut taken = 0;
        let frames = frames.map_or(null(), |f| f as *const vvae_tensor);
        // SAFETY: the test's tensor is valid or null.
        let status = unsafe { (api().vvae_stream_push)(self.s, frames, &mut taken) };
        outcome(self.vae.0, status).map(|status| (status, taken))
    }

    /// Status and number of frames written.
    pub fn pull(&self, out: &vvae_tensor, run: Option<&vvae_run_info>) -> Result<(i32, i64), Failure> {
        let mut written = 0;
        let run = run.map_or(null(), |r| r as *const vvae_run_info);
        // SAFETY: the test's tensor and run info are valid.
        let status = unsafe { (api().vvae_stream_pull)(self.s, out, run, &mut written) };
        outcome(self.vae.0, status).map(|status| (status, written))
    }
}

impl Drop for Stream<'_> {
    fn drop(&mut self) {
        // SAFETY: a stream handle, open or closed.
        unsafe { (api().vvae_stream_close)(self.s) };
    }
}
