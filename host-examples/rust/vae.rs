//! A model on a device: what a Rust host wraps around the C calls.

use std::cell::{Cell, RefCell};
use std::ffi::{CString, c_char, c_void};
use std::fmt;
use std::path::Path;
use std::ptr::{null, null_mut};
use std::sync::Arc;

use crate::Result;
use crate::api::*;
use crate::draft::{self, Draft};
use crate::interrupt;
use crate::tensor::Frames;
use crate::warnings::{Warnings, hear};

/// The parameter for the file of times.
pub const TRACE: &str = "trace";

/// Whether the image is computed whole.
pub fn is_untiled(plan: &vvae_plan_info) -> bool {
    plan.tile_rows * plan.tile_columns == 1
}

unsafe extern "C" fn stop_if_interrupted(_: *mut c_void, _: u64, _: u64, _: *const c_char) -> i32 {
    i32::from(interrupt::requested())
}

/// The latents that `latents=model` gives: `(z - shift) * scale`, or `(z - mean) / deviation` of each channel.
#[derive(Debug, Clone)]
pub struct LatentFacts {
    pub known: bool,
    pub format: String,
    /// Published models that it may be.
    pub formats: Vec<String>,
    pub packing: u32,
    pub channels: u32,
    pub scale: f64,
    pub shift: f64,
    pub means: Vec<f64>,
    pub deviations: Vec<f64>,
}

impl fmt::Display for LatentFacts {
    fn fmt(&self, to: &mut fmt::Formatter) -> fmt::Result {
        if !self.known {
            return match &self.formats[..] {
                [] => write!(to, "not known: no published model has such latents"),
                formats => write!(to, "those of {}: latent_format says which", formats.join(" or ")),
            };
        }
        let format = if self.format.is_empty() { "config.json" } else { &self.format };
        write!(to, "{format}: {} channels", self.channels)?;
        if self.packing > 1 {
            write!(to, ", {0} x {0} latent pixels packed into one", self.packing)?;
        }
        if self.means.is_empty() {
            return write!(to, ", (z - {}) * {}", self.shift, self.scale);
        }
        let least = |values: &[f64]| values.iter().copied().fold(f64::INFINITY, f64::min);
        let most = |values: &[f64]| values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let [means, deviations] = [&self.means, &self.deviations].map(|v| format!("{:.3} to {:.3}", least(v), most(v)));
        write!(to, ", (z - mean) / deviation; means {means}, deviations {deviations}")
    }
}

pub struct Vae {
    api: &'static Api,
    raw: *mut vvae,
    model: Cell<vvae_model_desc>,
    /// Whether latents are those of the diffusion model.
    packed: Cell<bool>,
    /// The trace that is written, if one was asked for.
    trace: RefCell<Option<Draft>>,
    /// Of the calls. The library has its address, which does not change.
    warnings: Arc<Warnings>,
}

impl Vae {
    pub fn open(weights: &Path, device: &str) -> Result<Vae> {
        let api = api()?;
        draft::protect(weights);
        let weights = weights.to_str().ok_or_else(|| format!("{} is no UTF-8; rename it", weights.display()))?;
        let (weights, device) = (c_text(weights)?, c_text(device)?);
        let warnings = Arc::<Warnings>::default();
        let info = vvae_create_info {
            struct_size: size_of::<vvae_create_info>() as u32,
            abi_version: VVAE_ABI_VERSION,
            weights: weights.as_ptr(),
            device: device.as_ptr(),
            log: Some(hear),
            log_user: Arc::as_ptr(&warnings).cast_mut().cast(),
            alloc: None,
            free: None,
            alloc_user: null_mut(),
            device_alloc: None,
            device_free: None,
            device_alloc_user: null_mut(),
            progress: Some(stop_if_interrupted),
            progress_user: null_mut(),
        };
        let mut raw = null_mut();
        // SAFETY: the struct and its texts outlive the call.
        let status = unsafe { (api.vvae_create)(&info, &mut raw) };
        warnings.call_ended(status < VVAE_OK);
        check(api, null_mut(), status)?;
        let (model, packed, trace) = (Cell::new(sized()), Cell::new(false), RefCell::default());
        let vae = Vae { api, raw, model, packed, trace, warnings };
        interrupt::watch(raw);
        vae.read_model()?;
        Ok(vae)
    }

    /// What the library knows of the latents of the diffusion model, with the present settings.
    pub fn latents(&self) -> LatentFacts {
        let desc = self.model.get();
        let statistics = |values: *const f64| match desc.statistics_count {
            0 => Vec::new(),
            // SAFETY: the library gives this many, valid while the handle is open.
            count => unsafe { std::slice::from_raw_parts(values, count as usize) }.to_vec(),
        };
        LatentFacts {
            known: desc.latents_known == 1,
            format: fixed_text(&desc.latent_format),
            formats: fixed_text(&desc.latent_formats).split(',').map(str::to_owned).filter(|f| !f.is_empty()).collect(),
            packing: desc.packing,
            channels: desc.packed_channels,
            scale: desc.latent_scale,
            shift: desc.latent_shift,
            means: statistics(desc.latent_means),
            deviations: statistics(desc.latent_deviations),
        }
    }

    fn read_model(&self) -> Result<()> {
        let mut desc: vvae_model_desc = sized();
        // SAFETY: the struct is as long as it says.
        self.check(unsafe { (self.api.vvae_model_info)(self.raw, &mut desc) })?;
        self.model.set(desc);
        Ok(())
    }

    /// The sizes of the model, with latents as the setting `latents` has them.
    pub fn model(&self) -> vvae_model_desc {
        let raw = self.model.get();
        if !self.packed.get() {
            return raw;
        }
        vvae_model_desc { latent_channels: raw.packed_channels, spatial_scale: raw.spatial_scale * raw.packing, ..raw }
    }

    /// The family of models that the checkpoint is of.
    pub fn family(&self) -> String {
        fixed_text(&self.model.get().family)
    }

    pub fn configure(&self, key: &str, value: &str) -> Result<()> {
        if key == TRACE { self.begin_trace(value) } else { self.set(key, value) }
    }

    fn set(&self, key: &str, value: &str) -> Result<()> {
        let (key_text, value_text) = (c_text(key)?, c_text(value)?);
        // SAFETY: two texts that outlive the call.
        self.check(unsafe { (self.api.vvae_configure)(self.raw, key_text.as_ptr(), value_text.as_ptr()) })?;
        match key {
            "latents" => self.packed.set(value == "model"),
            "latent_format" => self.read_model()?,
            _ => {}
        }
        Ok(())
    }

    /// The plan in numbers and in words.
    pub fn plan(&self, node: &str, shape: [i64; 5]) -> Result<(vvae_plan_info, String)> {
        let node = c_text(node)?;
        let (mut info, mut text) = (sized::<vvae_plan_info>(), vec![0u8; 1 << 14]);
        // SAFETY: every pointer is valid, and the buffer as long as said.
        let status = unsafe {
            let room = text.as_mut_ptr().cast::<c_char>();
            (self.api.vvae_plan)(self.raw, node.as_ptr(), shape.as_ptr(), &mut info, room, text.len() as u64)
        };
        self.check(status)?;
        Ok((info, until_nul(&text)))
    }

    /// The plan as a timeline, for pictures.
    pub fn timeline(&self, node: &str, shape: [i64; 5]) -> Result<serde_json::Value> {
        let node = c_text(node)?;
        let (mut text, mut length) = (vec![0u8; 1 << 20], 0);
        loop {
            let (room, capacity) = (text.as_mut_ptr().cast::<c_char>(), text.len() as u64);
            // SAFETY: every pointer is valid, and the buffer as long as said.
            let status = unsafe {
                (self.api.vvae_plan_timeline)(self.raw, node.as_ptr(), shape.as_ptr(), room, capacity, &mut length)
            };
            self.check(status)?;
            if length < capacity {
                let told = serde_json::from_slice(&text[..length as usize]);
                return told
                    .map_err(|why| format!("the library's timeline is no JSON: {why}; build both from one source"));
            }
            text.resize(length as usize + 1, 0);
        }
    }

    /// The library writes the trace into a draft, so that it gets its name as every other output does.
    fn begin_trace(&self, target: &str) -> Result<()> {
        let mut draft = if target.is_empty() { None } else { Some(Draft::new(Path::new(target))?) };
        if let Some(draft) = &mut draft {
            draft.close();
        }
        let path = draft.as_ref().map_or(Some(""), |draft| draft.path.to_str());
        let path = path.ok_or_else(|| format!("{target} lies in a folder whose name is no UTF-8; name another"))?;
        self.set(TRACE, path)?;
        *self.trace.borrow_mut() = draft;
        Ok(())
    }

    /// Gives the trace its name, if there is one. Without it the trace is gone with the model.
    pub fn end_trace(&self) -> Result<()> {
        let Some(draft) = self.trace.take() else { return Ok(()) };
        self.set(TRACE, "")?;
        draft.finish()
    }

    pub fn encode(&self, video: &Frames, latent: &mut Frames) -> Result<()> {
        // SAFETY: the tensors describe memory that outlives the call, and the output is ours alone.
        let status =
            unsafe { (self.api.vvae_encode)(self.raw, &video.tensor(), &latent.tensor_mut(), &interruptible()) };
        self.check(status).map(|_| ())
    }

    pub fn decode(&self, latent: &Frames, video: &mut Frames) -> Result<()> {
        // SAFETY: as in `encode`.
        let status =
            unsafe { (self.api.vvae_decode)(self.raw, &latent.tensor(), &video.tensor_mut(), &interruptible()) };
        self.check(status).map(|_| ())
    }

    /// Either direction, on tensors wherever they lie.
    ///
    /// # Safety
    /// They describe memory that outlives the call, and the output's is nobody else's meanwhile.
    pub unsafe fn run(&self, encode: bool, input: &vvae_tensor, output: &vvae_tensor) -> Result<()> {
        let call = if encode { self.api.vvae_encode } else { self.api.vvae_decode };
        // SAFETY: the caller's promise.
        self.check(unsafe { call(self.raw, input, output, &interruptible()) }).map(|_| ())
    }

    pub fn memory(&self) -> Result<vvae_memory_info> {
        let mut info = sized();
        // SAFETY: the struct is as long as it says.
        self.check(unsafe { (self.api.vvae_memory)(self.raw, &mut info) })?;
        Ok(info)
    }

    /// What each device holds, and its part of the last run.
    pub fn devices(&self) -> Result<Vec<vvae_handle_device_info>> {
        let device = |index| {
            let mut info: vvae_handle_device_info = sized();
            // SAFETY: the struct is as long as it says.
            self.check(unsafe { (self.api.vvae_handle_device)(self.raw, index, &mut info) })?;
            Ok(info)
        };
        let first = device(0)?;
        let others = (1..first.device_count).map(device);
        std::iter::once(Ok(first)).chain(others).collect()
    }

    /// About the last run that finished, or the last pull that wrote frames.
    pub fn last_run(&self) -> Result<vvae_run_report> {
        let mut report = sized();
        // SAFETY: the struct is as long as it says; no text is asked for.
        self.check(unsafe { (self.api.vvae_last_run)(self.raw, &mut report, null_mut(), 0) })?;
        Ok(report)
    }

    /// First and count of the input frames that a range of output frames needs; a count of 0: to the clip's end.
    pub fn range_inputs(&self, node: &str, clip_frames: u64, first: u64, count: u64) -> Result<(u64, u64)> {
        let node = c_text(node)?;
        let number = |n: u64| i64::try_from(n).map_err(|_| format!("{n} is more frames than any clip has"));
        let (clip, first, count) = (number(clip_frames)?, number(first)?, number(count)?);
        let (mut from, mut frames) = (0, 0);
        // SAFETY: every pointer is valid.
        self.check(unsafe {
            (self.api.vvae_range_inputs)(self.raw, node.as_ptr(), clip, first, count, &mut from, &mut frames)
        })?;
        Ok((from as u64, frames as u64))
    }

    /// `shape`: of what goes in; its number of frames does not matter. What comes out begins with frame `first` of the
    /// clip.
    pub fn stream(&self, node: &str, shape: [i64; 5], first: u64) -> Result<Stream<'_>> {
        let node = c_text(node)?;
        let mut raw = null_mut();
        let first = i64::try_from(first).map_err(|_| format!("{first} is no frame of any clip"))?;
        // SAFETY: every pointer is valid.
        self.check(unsafe {
            (self.api.vvae_stream_open_at)(self.raw, node.as_ptr(), shape.as_ptr(), first, &mut raw)
        })?;
        Ok(Stream { vae: self, raw })
    }

    /// Frames of latent for this many frames of video.
    pub fn latent_frames(&self, frames: u64) -> u64 {
        (frames - 1).div_ceil(u64::from(self.model().time_scale)) + 1
    }

    /// Frames of video that this many frames of latent stand for.
    pub fn video_frames(&self, latents: u64) -> u64 {
        (latents - 1) * u64::from(self.model().time_scale) + 1
    }

    /// Channels, height and width of the latent of a picture.
    pub fn latent_size(&self, width: usize, height: usize) -> [usize; 3] {
        let (model, scale) = (self.model(), self.model().spatial_scale as usize);
        [model.latent_channels as usize, height.div_ceil(scale), width.div_ceil(scale)]
    }

    fn check(&self, status: i32) -> Result<i32> {
        self.warnings.call_ended(status < VVAE_OK);
        check(self.api, self.raw, status)
    }
}

impl Drop for Vae {
    fn drop(&mut self) {
        interrupt::unwatch(self.raw);
        // SAFETY: a handle of ours; its streams borrow it, so they are closed.
        unsafe { (self.api.vvae_free)(self.raw) };
    }
}

/// What a pull came to.
pub enum Pulled {
    /// The room is filled.
    Frame,
    /// Nothing until more is pushed.
    Again,
    /// Nothing any more.
    End,
}

pub struct Stream<'a> {
    vae: &'a Vae,
    raw: *mut vvae_stream,
}

impl Stream<'_> {
    /// Offers frames, or says that the clip is complete. The number of frames taken.
    pub fn push(&mut self, frames: Option<&Frames>) -> Result<usize> {
        let tensor = frames.map(Frames::tensor);
        let pointer = tensor.as_ref().map_or(null(), |t| t as *const vvae_tensor);
        let mut taken = 0;
        // SAFETY: the tensor describes memory that outlives the call.
        self.vae.check(unsafe { (self.vae.api.vvae_stream_push)(self.raw, pointer, &mut taken) })?;
        Ok(taken as usize)
    }

    /// `room` is for one frame: work goes on where it stopped, so more room would make nothing faster.
    pub fn pull(&mut self, room: &mut Frames) -> Result<Pulled> {
        let mut written = 0;
        // SAFETY: the tensor describes memory that outlives the call and is ours alone.
        let status =
            unsafe { (self.vae.api.vvae_stream_pull)(self.raw, &room.tensor_mut(), &interruptible(), &mut written) };
        Ok(match self.vae.check(status)? {
            VVAE_AGAIN => Pulled::Again,
            VVAE_END => Pulled::End,
            _ => Pulled::Frame,
        })
    }
}

impl Drop for Stream<'_> {
    fn drop(&mut self) {
        // SAFETY: a stream of ours.
        unsafe { (self.vae.api.vvae_stream_close)(self.raw) };
    }
}

/// A run that ends when the user presses Ctrl-C. The handler also calls vvae_cancel, which acts sooner, but only on a
/// run that has begun. The callback sees an interruption from before.
fn interruptible() -> vvae_run_info {
    unsafe extern "C" fn progress(_: *mut c_void, _: u64, _: u64, _: *const c_char) -> i32 {
        i32::from(interrupt::requested())
    }
    vvae_run_info { progress: Some(progress), ..sized() }
}

fn c_text(text: &str) -> Result<CString> {
    CString::new(text).map_err(|_| format!("{text:?} has a NUL within; leave it out"))
}

fn until_nul(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|b| *b == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).into_owned()
}

/// The status, or the library's own words on the failure.
fn check(api: &Api, raw: *mut vvae, status: i32) -> Result<i32> {
    if status >= VVAE_OK {
        return Ok(status);
    }
    let mut text = vec![0u8; 4096];
    // SAFETY: the buffer is as long as said.
    unsafe { (api.vvae_error)(raw, text.as_mut_ptr().cast::<c_char>(), text.len() as u64) };
    Err(until_nul(&text))
}
