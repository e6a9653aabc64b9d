//! A handle of the C ABI.

use std::ffi::{CStr, CString, c_char};
use std::path::Path;
use std::ptr::null_mut;

use video_vae::capi::*;

use super::devices::DEVICE;
use super::{Buffer, Failure, Stream, api, create_info, outcome, run_info, sized};

/// A handle that frees itself.
pub struct Vae(pub *mut vvae);

// SAFETY: a handle may be used from any thread. Concurrent use is an error, not a race.
unsafe impl Send for Vae {}
// SAFETY: as above.
unsafe impl Sync for Vae {}

impl Vae {
    pub fn open(weights: &Path) -> Result<Vae, Failure> {
        Vae::open_on(&DEVICE.with_borrow(CString::clone), weights)
    }

    pub fn open_on(device: &CStr, weights: &Path) -> Result<Vae, Failure> {
        let weights = CString::new(weights.to_str().expect("UTF-8")).expect("no NUL");
        Vae::create(&vvae_create_info { device: device.as_ptr(), ..create_info(&weights) })
    }

    pub fn create(info: &vvae_create_info) -> Result<Vae, Failure> {
        let mut v = null_mut();
        // SAFETY: `info` was made by `create_info`, and the test's values are valid.
        let status = unsafe { (api().vvae_create)(info, &mut v) };
        assert_eq!(status == VVAE_OK, !v.is_null(), "a handle if and only if the call succeeds");
        outcome(null_mut(), status).map(|_| Vae(v))
    }

    pub fn configure(&self, key: &str, value: &str) -> Result<i32, Failure> {
        let (key, value) = (CString::new(key).expect("no NUL"), CString::new(value).expect("no NUL"));
        // SAFETY: two C strings.
        outcome(self.0, unsafe { (api().vvae_configure)(self.0, key.as_ptr(), value.as_ptr()) })
    }

    pub fn model(&self) -> vvae_model_desc {
        let mut desc: vvae_model_desc = sized();
        // SAFETY: a struct as long as it says.
        outcome(self.0, unsafe { (api().vvae_model_info)(self.0, &mut desc) }).unwrap();
        desc
    }

    /// The shape of a tensor that has this one with 16 latent channels, 4 frames and 8 x 8 pixels a latent.
    pub fn fitted(&self, [b, c, t, h, w]: [i64; 5]) -> [i64; 5] {
        let info = self.model();
        let pixels = |length: i64| length * i64::from(info.spatial_scale) / 8;
        match c {
            16 => [b, i64::from(info.latent_channels), t, h, w],
            _ => [b, c, t, pixels(h), pixels(w)],
        }
    }

    pub fn encode(&self, video: &Buffer, latent: &mut Buffer) -> Result<i32, Failure> {
        self.encode_with(video, latent, &run_info())
    }

    pub fn encode_with(&self, video: &Buffer, latent: &mut Buffer, run: &vvae_run_info) -> Result<i32, Failure> {
        // SAFETY: tensors describe their buffers.
        outcome(self.0, unsafe { (api().vvae_encode)(self.0, &video.tensor(), &latent.tensor(), run) })
    }

    pub fn decode(&self, latent: &Buffer, video: &mut Buffer) -> Result<i32, Failure> {
        self.decode_with(latent, video, &run_info())
    }

    pub fn decode_with(&self, latent: &Buffer, video: &mut Buffer, run: &vvae_run_info) -> Result<i32, Failure> {
        // SAFETY: tensors describe their buffers.
        outcome(self.0, unsafe { (api().vvae_decode)(self.0, &latent.tensor(), &video.tensor(), run) })
    }

    /// Encodes or decodes tensors.
    pub fn run(
        &self,
        node: &str,
        input: &vvae_tensor,
        output: &vvae_tensor,
        run: &vvae_run_info,
    ) -> Result<i32, Failure> {
        let function = if node == "encode" { api().vvae_encode } else { api().vvae_decode };
        // SAFETY: the test's tensors and run info are valid, and memory outlives the work.
        outcome(self.0, unsafe { function(self.0, input, output, run) })
    }

    /// The report of the last run, and its text.
    pub fn last_run(&self) -> Result<(vvae_run_report, String), Failure> {
        let (mut report, mut text) = (sized::<vvae_run_report>(), [0 as c_char; 4096]);
        // SAFETY: every pointer is valid, and the buffer has the given size.
        let status = unsafe { (api().vvae_last_run)(self.0, &mut report, text.as_mut_ptr(), text.len() as u64) };
        // SAFETY: a NUL is there from the start.
        let text = unsafe { CStr::from_ptr(text.as_ptr()) }.to_str().expect("UTF-8").to_owned();
        outcome(self.0, status).map(|_| (report, text))
    }

    pub fn plan(&self, node: &str, shape: [i64; 5]) -> Result<(vvae_plan_info, String), Failure> {
        let node = CString::new(node).expect("no NUL");
        let (mut info, mut text) = (sized::<vvae_plan_info>(), [0 as c_char; 4096]);
        // SAFETY: every pointer is valid, and the buffer has the given size.
        let status = unsafe {
            (api().vvae_plan)(self.0, node.as_ptr(), shape.as_ptr(), &mut info, text.as_mut_ptr(), text.len() as u64)
        };
        // SAFETY: the buffer has a NUL.
        let text = unsafe { CStr::from_ptr(text.as_ptr()) }.to_str().expect("UTF-8").to_owned();
        outcome(self.0, status).map(|_| (info, text))
    }

    pub fn stream(&self, node: &str, shape: [i64; 5]) -> Result<Stream<'_>, Failure> {
        let node = CString::new(node).expect("no NUL");
        let mut s = null_mut();
        // SAFETY: every pointer is valid.
        let status = unsafe { (api().vvae_stream_open)(self.0, node.as_ptr(), shape.as_ptr(), &mut s) };
        outcome(self.0, status).map(|_| Stream { vae: self, s })
    }

    /// First and count of the input frames of a range.
    pub fn range_inputs(&self, node: &str, clip: i64, first: i64, count: i64) -> Result<(i64, i64), Failure> {
        let node = CString::new(node).expect("no NUL");
        let (mut from, mut frames) = (-1, -1);
        // SAFETY: every pointer is valid.
        let status =
            unsafe { (api().vvae_range_inputs)(self.0, node.as_ptr(), clip, first, count, &mut from, &mut frames) };
        outcome(self.0, status).map(|_| (from, frames))
    }

    /// Runs `node` on the input of a range.
    pub fn run_range(
        &self,
        node: &str,
        input: &vvae_tensor,
        (clip, first): (i64, i64),
        output: &vvae_tensor,
        run: &vvae_run_info,
    ) -> Result<i32, Failure> {
        let function = if node == "encode" { api().vvae_encode_range } else { api().vvae_decode_range };
        // SAFETY: the test's tensors and run info are valid.
        outcome(self.0, unsafe { function(self.0, input, clip, first, output, run) })
    }

    /// The timeline of a plan, parsed.
    pub fn timeline(&self, node: &str, shape: [i64; 5]) -> Result<serde_json::Value, Failure> {
        let node = CString::new(node).unwrap();
        let (mut text, mut length) = (Vec::<u8>::new(), 0);
        loop {
            let (out, capacity) = (text.as_mut_ptr().cast(), text.len() as u64);
            // SAFETY: the texts live, and the buffer has the capacity.
            let status = unsafe {
                (api().vvae_plan_timeline)(self.0, node.as_ptr(), shape.as_ptr(), out, capacity, &mut length)
            };
            outcome(self.0, status)?;
            if length < capacity {
                return Ok(serde_json::from_slice(&text[..length as usize]).expect("valid JSON"));
            }
            text.resize(length as usize + 1, 0);
        }
    }

    pub fn plan_range(
        &self,
        node: &str,
        shape: [i64; 5],
        first: i64,
        count: i64,
    ) -> Result<(vvae_plan_info, String), Failure> {
        let node = CString::new(node).expect("no NUL");
        let (mut info, mut text) = (sized::<vvae_plan_info>(), vec![0 as c_char; 4096]);
        let (out, capacity) = (text.as_mut_ptr(), text.len() as u64);
        // SAFETY: every pointer is valid.
        let status = unsafe {
            (api().vvae_plan_range)(self.0, node.as_ptr(), shape.as_ptr(), first, count, &mut info, out, capacity)
        };
        // SAFETY: the buffer has a NUL.
        let text = unsafe { CStr::from_ptr(text.as_ptr()) }.to_str().expect("UTF-8").to_owned();
        outcome(self.0, status).map(|_| (info, text))
    }

    /// A stream that begins with output frame `first`.
    pub fn stream_at(&self, node: &str, shape: [i64; 5], first: i64) -> Result<Stream<'_>, Failure> {
        let node = CString::new(node).expect("no NUL");
        let mut s = null_mut();
        // SAFETY: every pointer is valid.
        let status = unsafe { (api().vvae_stream_open_at)(self.0, node.as_ptr(), shape.as_ptr(), first, &mut s) };
        assert_eq!(status == VVAE_OK, !s.is_null(), "a stream if and only if the call succeeds");
        outcome(self.0, status).map(|_| Stream { vae: self, s })
    }

    pub fn memory(&self) -> vvae_memory_info {
        let mut info = sized();
        // SAFETY: `struct_size` is right.
        let status = unsafe { (api().vvae_memory)(self.0, &mut info) };
        outcome(self.0, status).expect("memory figures");
        info
    }

    pub fn trim(&self, what: u32) -> Result<i32, Failure> {
        // SAFETY: a handle and a number.
        outcome(self.0, unsafe { (api().vvae_trim)(self.0, what) })
    }

    pub fn cancel(&self) -> Result<i32, Failure> {
        // SAFETY: a handle.
        outcome(self.0, unsafe { (api().vvae_cancel)(self.0) })
    }

    /// Frees it now, and returns the status.
    pub fn free(self) -> i32 {
        let v = self.0;
        std::mem::forget(self);
        // SAFETY: a handle.
        unsafe { (api().vvae_free)(v) }
    }
}

impl Drop for Vae {
    fn drop(&mut self) {
        // SAFETY: a handle, open or freed.
        unsafe { (api().vvae_free)(self.0) };
    }
}
